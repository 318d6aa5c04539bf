"""What `pagoda doctor` and `pagoda plan` say of CUDA GPUs."""

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pagoda.cli.console import human_bytes
from pagoda.gpu_setup import BF16_SINCE

_FP8_SINCE = (8, 9)
"""Compute capability from which a GPU multiplies 8-bit floats."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA GPU.   total_bytes, free_bytes: of its memory.   capability: compute capability, (major, minor)."""

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
            f"{self.name}, {human_bytes(self.free_bytes)} of {human_bytes(self.total_bytes)} free, "
            f"sm_{major}{minor}, {self.num_processors} multiprocessors"
        )


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch can use, in its order. Begins to use each of them."""
    import torch

    found: list[Gpu] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        known = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(known.name, total, free, (known.major, known.minor), known.multi_processor_count))
    return found


def describe_gpus(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return a line per GPU, then the driver and what was built for it; or why torch can use none."""
    import torch

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
    if any(gpu.capability < BF16_SINCE for gpu in gpus):
        lines.append("below sm_80 nothing was tested, and there is no bfloat16 arithmetic: float16 takes its place")
    if any(gpu.capability < _FP8_SINCE for gpu in gpus):
        lines.append("below sm_89 there are no products of 8-bit floats: quantization='fp8' saves memory only")
    try:
        triton = f"Triton {version('triton')}{_missing_for_triton()}"
    except PackageNotFoundError:
        triton = "no Triton: pip install 'pagoda-llm[cuda]'"
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
