"""CUDA GPUs: pinned memory, a stream for KV blocks, graphs, and what `pagoda doctor` says of them."""

import logging
import os
import re
import shutil
import sysconfig
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.worker.devices.device import Capture, Device, HostCopy, lazy_zeros

if TYPE_CHECKING:
    from pagoda.kernels.ops import Ops
    from pagoda.worker.devices.device import Graph

logger = logging.getLogger("pagoda")

_BF16_SINCE = (8, 0)
"""Compute capability from which a GPU multiplies in bfloat16."""

_FP8_SINCE = (8, 9)
"""Compute capability from which a GPU multiplies 8-bit floats."""

_MARGIN = 0.02
"""Of the GPU's memory: for what no step shows, such as the launches in CUDA graphs, compiled kernels and fragments."""


class CudaDevice(Device):
    """One GPU. Computations are what is submitted to the current stream; KV blocks move on a stream of their own."""

    name: ClassVar[str] = "cuda"
    kernels: ClassVar[tuple[str, ...]] = ("triton", "torch", "reference")
    ray_resource: ClassVar[str | None] = "GPU"

    def __init__(self, threads: int | None = None, index: int = 0) -> None:
        super().__init__(1, index)  # the host only starts the GPU's work

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def report(cls) -> str:
        return describe_gpus()

    def _require(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' was asked for, but torch sees no CUDA GPU here; use device='cpu'")

    def fit_dtype(self, dtype: str, asked: str) -> str:
        """A GPU without bfloat16 computes in float16."""
        if dtype != "bfloat16" or not torch.cuda.is_available():  # without a GPU, loading fails
            return dtype
        capability = torch.cuda.get_device_capability(self.index)
        if capability >= _BF16_SINCE:
            return dtype
        has = "{}.{}".format(*capability)
        if asked == "bfloat16":
            raise ConfigError(
                f"dtype='bfloat16' needs a GPU of compute capability 8.0 or later (this one has {has}); take "
                "dtype='float16', or 'float32' if a model's values are too large for that"
            )
        logger.warning(
            "dtype is float16 in place of the model's bfloat16, which this GPU does not have (compute capability %s); "
            "if values are too large for float16, set dtype='float32'",
            has,
        )
        return "float16"

    def summary(self) -> str:
        self._require()
        return visible_gpus()[self.index].summary

    def free_bytes(self) -> int:
        """Bytes the driver has free, and those that torch's allocator holds unused."""
        self._require()
        free, _ = torch.cuda.mem_get_info(self.index)
        return free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)

    @property
    def margin_bytes(self) -> int:
        _, total = torch.cuda.mem_get_info(self.index)
        return int(total * _MARGIN)

    def prepare(self) -> None:
        self._require()
        torch.cuda.set_device(self.device)
        # fp32 means fp32: TF32 would make the reference precision depend on the card.
        torch.backends.cuda.matmul.allow_tf32 = False

    def make_capture(self, ops: "Ops") -> Capture | None:
        return CudaCapture() if ops.name == "triton" else None

    def free_bytes_beside(self, run: Callable[[], object]) -> int:
        """As documented, and log the plan. A graph's memory, even if it is only reserved, is free for graphs alone."""
        torch.cuda.empty_cache()  # of a run that did not fit
        before = torch.cuda.memory_allocated(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        run()
        torch.cuda.synchronize(self.index)
        peak = torch.cuda.max_memory_allocated(self.index) - before
        torch.cuda.empty_cache()
        unused, total = torch.cuda.mem_get_info(self.index)
        margin = self.margin_bytes
        kept = torch.cuda.memory_allocated(self.index) - before  # of the peak, and not free any more
        held = torch.cuda.memory_reserved(self.index) - before - kept  # by graphs, and by pieces between tensors
        others = total - unused - before - kept - held
        free = max(0, unused + kept - peak - margin)
        logger.info(
            "%s has %d MiB: %d for weights, %d for the largest step, %d for graphs, %d kept free, %d held by others, "
            "%d left",
            torch.cuda.get_device_name(self.index),
            *(part >> 20 for part in (total, before, peak, held, margin, others, free)),
        )
        return free

    @cached_property
    def _copies(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        on_host: list[torch.Tensor] = []
        for tensor in tensors:
            # torch keeps pinned memory for later, and gives out none whose copy is not complete.
            on_host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
            on_host[-1].copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _EventCopy(on_host, event)

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        # Not torch's pinned memory, which is rounded up to a power of two.
        memory = lazy_zeros((num_bytes,), torch.uint8)
        runtime = torch.cuda.cudart()
        assert runtime is not None, "torch has no CUDA"
        status = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if status:
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned (CUDA error {status})")
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
        return memory

    def store(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        source.record_stream(self._copies)
        with torch.cuda.stream(self._copies):
            for rows, target in zip(source.split([len(target) for target in targets]), targets, strict=True):
                target.copy_(rows, non_blocking=True)

    def load(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        num_rows = sum(len(source) for source in sources)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            loaded = torch.empty((num_rows, *sources[0].shape[1:]), dtype=sources[0].dtype, device=self.device)
            for rows, source in zip(loaded.split([len(source) for source in sources]), sources, strict=True):
                rows.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        computing.wait_event(arrived)
        loaded.record_stream(computing)
        return loaded

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise WorkerDied(f"the GPU failed: {error}") from error


class _EventCopy:
    """See HostCopy: done once the event is."""

    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event) -> None:
        self._tensors, self._event = tensors, event

    def is_done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # the GPU failed: `wait` raises that
            return True

    def wait(self) -> list[np.ndarray]:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # nothing can be computed any more in this process
            raise WorkerDied(f"the GPU failed: {error}") from error
        return [tensor.numpy() for tensor in self._tensors]


class CudaCapture:
    """See Capture. The graphs of an instance share their memory."""

    def __init__(self) -> None:
        self._stream: Any = None  # not torch's own, which all of a process share
        # Kept, because torch refuses memory that no graph uses any more, and that libraries still have a part of.
        self._last: Any = None
        # Kept, because torch's allocator asks them in each later capture whether its memory is theirs.
        self._not_ended: list[Any] = []

    def __call__(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> "Graph":
        computing = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        pool = None if self._last is None else self._last.pool()
        try:
            # Other threads may allocate memory meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                out = run()
        except BaseException:
            torch.cuda.set_stream(computing)  # torch leaves its own if the capture cannot be ended
            self._last = None
            try:
                graph.pool()
            except RuntimeError:  # it has one once its capture has ended
                self._not_ended.append(graph)
            raise
        self._last = graph
        return out, graph.replay


# What `pagoda doctor` and `pagoda plan` say


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.   total_bytes, free_bytes: of its memory.   capability: compute capability, (major, minor)."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    num_processors: int

    @property
    def summary(self) -> str:
        """Return its name, memory, and what kernels are compiled for."""
        major, minor = self.capability
        return (
            f"{self.name}, {self.free_bytes / 2**30:.1f} GiB of {self.total_bytes / 2**30:.1f} GiB free, "
            f"sm_{major}{minor}, {self.num_processors} multiprocessors"
        )


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch can use, in its order. Begins to use each of them."""
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        known = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(known.name, total, free, (known.major, known.minor), known.multi_processor_count))
    return found


def describe_gpus(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return a line per GPU, then the driver and what was built for it; or why torch can use none."""
    driver = driver_version(proc)
    gpus = visible_gpus()
    if not gpus:
        if driver is None:
            return "none that torch can use"
        built = (
            "CPUs only; install one for CUDA"
            if torch.version.cuda is None
            else (f"CUDA {torch.version.cuda}: the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides the GPU")
        )
        return f"none that torch can use; there is driver {driver}, but torch {torch.__version__} is built for {built}"
    lines = [gpu.summary for gpu in gpus]
    if len(gpus) > 1:
        lines = [f"{index}: {line}" for index, line in enumerate(lines)]
        lines.append("an engine uses GPU 0; CUDA_VISIBLE_DEVICES chooses another")
    if any(gpu.capability < _BF16_SINCE for gpu in gpus):
        lines.append("below sm_80 nothing was tested, and there is no bfloat16 arithmetic: float16 takes its place")
    if any(gpu.capability < _FP8_SINCE for gpu in gpus):
        lines.append("below sm_89 there are no products of 8-bit floats: quantization='fp8' saves memory only")
    try:
        triton = f"Triton {version('triton')}{_missing_for_triton()}"
    except PackageNotFoundError:
        triton = "no Triton: pip install triton"
    lines.append(f"driver {driver or 'unknown'}, torch {torch.__version__} for CUDA {torch.version.cuda}, {triton}")
    return "\n".join(lines)


def _missing_for_triton() -> str:
    """Return what is missing of that with which Triton compiles what launches its kernels."""
    missing: list[str] = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler (gcc or clang)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python's header files (python3-dev)")
    return f", which needs {' and '.join(missing)}" if missing else ""


def driver_version(proc: Path) -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", proc.read_text())
    except OSError:
        return None
    return found[0] if found else None
