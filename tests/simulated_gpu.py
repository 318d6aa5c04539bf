"""A CUDA GPU that the CPU simulates: it shows what a program gets wrong about where its tensors are.

Its tensors are `torch.Tensor`s that say they are on cuda:0. Each holds one on the CPU, which computes what is asked. As
on a GPU, tensors of two devices do not go into one computation; numpy cannot read the GPU's memory, and kernels in
Triton cannot read the host's; a copy that the host does not wait for needs pinned memory; and a graph is not captured
of code that waits for the device, or copies from or to the host. Kernels run in Triton's interpreter. New memory may
hold anything: floats are NaN.

Not simulated: time, the order of streams (all is done in the program's order), and the replay of graphs, which runs
their code again.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.fake_cuda import FakeCuda
from tests.worker.sync_watch import COPIES, WAITS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

_UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided"}
_OF_THE_HOST = {"numpy", "__array__", "share_memory_", "pin_memory"}
_WITHOUT_SCALARS = {"__getitem__", "__setitem__", "cat", "stack", "matmul", "linear", "embedding"}
"""Functions for which a number on the host is a tensor of another device."""


class GpuTensor(torch.Tensor):
    """held: on the CPU, of the same shape and memory layout."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "GpuTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called past __torch_function__: it would compute nothing")


class _Mode(TorchFunctionMode):
    """Makes tensors for device="cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@dataclass
class SimulatedGpu:
    """pinned: addresses of the host's memory.   is_capturing: a graph is being captured.

    num_graphs: that were captured.   num_replays: of them all.
    """

    pinned: set[int] = field(default_factory=set)
    is_capturing: bool = False
    num_graphs: int = 0
    num_replays: int = 0

    def capture(
        self, run: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[tuple[torch.Tensor, ...], Callable[[], object]]:
        self.is_capturing = True
        try:
            results = run()
        finally:
            self.is_capturing = False
        self.num_graphs += 1

        def replay() -> None:
            self.num_replays += 1
            for result, again in zip(results, run(), strict=True):
                result.copy_(again)

        return results, replay


_gpu = SimulatedGpu()


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    given = _tensors([args, kwargs])
    on_gpu = [tensor for tensor in given if isinstance(tensor, GpuTensor)]
    if name == "__get__" and on_gpu:
        return _attribute(func, on_gpu[0])
    if on_gpu and name in _OF_THE_HOST:
        raise TypeError(f"{name}: can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
    if name in ("to", "cpu", "cuda", "type_as"):
        return _move(name, args, kwargs)
    if name == "copy_":
        return _copy(args, kwargs)
    if name == "__setitem__" and _is_view(args[1]) and isinstance(args[2], torch.Tensor):
        return _copy((args[0][args[1]], args[2]), {})
    if on_gpu:
        _check_devices(name, given)
        if name in WAITS:
            _check_capture(name)
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        return func(*_held(args), **_held(kwargs))
    device, is_pinned, plain = _device_of(kwargs, bool(on_gpu))
    if name in COPIES and device.type == "cuda":
        _check_capture(name)
    made = func(*_held(args), **_held(plain))
    if is_pinned:
        _pin(made)
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if device.type == "cpu":
        return made
    if name in _UNINITIALISED and made.numel():
        _fill_with_anything(made)
    return _wrapped(made, {id(tensor.held): tensor for tensor in on_gpu})


def _is_view(index: Any) -> bool:
    """Return whether what it selects is a view of the tensor, into which values may be copied from another device."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)


def _fill_with_anything(made: torch.Tensor) -> None:
    if made.dtype.is_floating_point and made.dtype.itemsize > 1:
        made.fill_(float("nan"))
    else:
        made.view(torch.uint8).fill_(0x7F)  # of float8_e4m3fn, this is NaN


def _check_capture(what: str) -> None:
    if _gpu.is_capturing:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def _attribute(func: Callable[..., Any], tensor: GpuTensor) -> Any:
    of = getattr(func, "__self__", None)
    if of is torch.Tensor.device:
        return CUDA
    if of is torch.Tensor.is_cuda:
        return True
    if of is torch.Tensor.is_cpu:
        return False
    found = func(tensor.held)
    return _wrapped(found, {id(tensor.held): tensor})


def _device_of(kwargs: Mapping[str, Any], has_gpu: bool) -> tuple[torch.device, bool, dict[str, Any]]:
    """Return where the result is, whether it is pinned, and the keywords with which the CPU computes it."""
    plain = dict(kwargs)
    device = CUDA if has_gpu else CPU
    if plain.get("device") is not None:
        device = torch.device(plain["device"])
        plain["device"] = CPU
    is_pinned = plain.pop("pin_memory", False)
    assert not is_pinned or device.type == "cpu", "only the host's memory is pinned"
    return device, is_pinned, plain


def _pin(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    _gpu.pinned.add(storage.data_ptr())
    weakref.finalize(storage, _gpu.pinned.discard, storage.data_ptr())


def _move(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    source, *rest = args
    plain = dict(kwargs)
    device = source.device
    if name == "cpu":
        device = CPU
    elif name == "cuda":
        device, rest = CUDA, []
        plain.pop("device", None)
    # By position: the device or a tensor, the dtype (None for the same), non_blocking and copy.
    flags = [value for value in rest if isinstance(value, bool)]
    if len(flags) > 1:
        plain["copy"] = flags[1]
    kept = []
    for value in rest:
        if value is None or isinstance(value, bool):
            continue
        if isinstance(value, (str, torch.device)):
            device = torch.device(value)
        elif isinstance(value, torch.Tensor):
            device = value.device
            kept.append(value.dtype)
        else:
            kept.append(value)
    if plain.get("device") is not None:
        device = torch.device(plain.pop("device"))
    plain.pop("non_blocking", None)
    held = source.held if isinstance(source, GpuTensor) else source
    moved = held.to(*kept, **plain) if kept or plain else held
    if device.type == source.device.type:
        return source if moved is held else (GpuTensor(moved) if device.type == "cuda" else moved)
    _check_capture(name)
    if moved is held:
        moved = held.clone(memory_format=torch.preserve_format)
    return GpuTensor(moved) if device.type == "cuda" else moved


def _copy(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if target.device.type != source.device.type:
        _check_capture("copy_")
        on_host = target if target.device.type == "cpu" else source
        assert not non_blocking or _is_pinned(on_host), "a copy that is not waited for needs pinned memory"
    _held(target).copy_(_held(source))
    return target


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _gpu.pinned


def _check_devices(name: str, given: list[torch.Tensor]) -> None:
    for tensor in given:
        if not isinstance(tensor, GpuTensor) and (tensor.dim() or name in _WITHOUT_SCALARS):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu, the latter "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def _held(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.held
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_held, value))
    if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in _tensors(value)):
        return type(value)(_held(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _held(item) for key, item in value.items()}
    return value


def _wrapped(value: Any, known: Mapping[int, GpuTensor]) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor):
        return known[id(value)] if id(value) in known else GpuTensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_wrapped(item, known) for item in value))
    if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
        return type(value)([_wrapped(item, known) for item in value])
    if type(value) in (list, tuple):
        return type(value)(_wrapped(item, known) for item in value)
    return value


class _Stream:
    device = CUDA

    def __init__(self, device: object = None) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Runtime:
    """cudart, as far as it pins memory."""

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        _gpu.pinned.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        _gpu.pinned.discard(pointer)
        return 0


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Within it, torch has one CUDA GPU, in all threads that begin there, too."""
    from triton.runtime import interpreter

    from pagoda.worker.devices.cuda import CudaCapture

    patches = pytest.MonkeyPatch()
    FakeCuda(patches)
    stream = _Stream()
    run_thread, launch = threading.Thread.run, interpreter.GridExecutor.__call__

    def run_simulated(thread: threading.Thread) -> None:
        with _Mode():
            run_thread(thread)

    def launch_simulated(executor: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor):
                raise ValueError(f"{executor.fn.__name__}: a pointer cannot be accessed from Triton (cpu tensor?)")
        with torch._C.DisableTorchFunction():
            launch(executor, *_held(args), **_held(kwargs))

    patches.setattr(threading.Thread, "run", run_simulated)
    patches.setattr(interpreter.GridExecutor, "__call__", launch_simulated)
    patches.setattr(CudaCapture, "__call__", lambda _, run: _gpu.capture(run))
    patches.setattr(torch.cuda, "Stream", _Stream)
    patches.setattr(torch.cuda, "Event", _Event)
    patches.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patches.setattr(torch.cuda, "stream", nullcontext)
    patches.setattr(torch.cuda, "cudart", lambda: _Runtime())
    patches.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patches.setattr(torch.Tensor, "is_pinned", _is_pinned)
    _gpu.num_graphs = _gpu.num_replays = 0
    try:
        with _Mode():
            yield _gpu
    finally:
        patches.undo()
