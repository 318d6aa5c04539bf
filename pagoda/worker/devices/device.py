"""Device: the one class that knows a device. torch is imported in its methods, since settings are resolved without."""

import math
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pagoda.kernels.ops import Ops

    Graph: TypeAlias = tuple[tuple[torch.Tensor, ...], Callable[[], object]]
    """Tensors, and what computes them again from the same inputs."""


class HostCopy(Protocol):
    """Results on their way to the host."""

    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, at once. Does not raise."""
        ...

    def wait(self) -> "list[np.ndarray]":
        """Wait for what was computed up to this copy; return the arrays. Any thread may call it, several times."""
        ...


class Capture(Protocol):
    """Records the device's work in a call. A result is valid until the next replay of any graph of this instance."""

    def __call__(self, run: "Callable[[], tuple[torch.Tensor, ...]]") -> "Graph":
        """Return the tensors that `run` gives, and what computes them again. Raises RuntimeError if it cannot."""
        ...


class Device:
    """One device of this machine.

    The methods here suit any device that torch knows, where everything is done when a call returns; a subclass says
    what is different. What the host submits to a device, other than copies, is called its computations here.

    name: in the settings.   is_host: its memory is the host's, and the cores that compute also schedule.
    joins_ranks: several of them can compute one model: the ranks' collectives read and write its tensors, as those of
        a CPU.
    kernels: names of the kernels (see kernels/select.py) that run on it, the one that "auto" takes first.
    threads: of the host, for the kernels.
    ray_resource: what a Ray cluster counts such devices as, None if it need not.
    """

    name: ClassVar[str]
    is_host: ClassVar[bool] = False
    joins_ranks: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = ("torch", "reference")
    ray_resource: ClassVar[str | None] = None

    def __init__(self, threads: int | None = None, index: int = 0) -> None:
        """threads: of the settings, None to choose.   index: which of several devices of this kind.

        Must not begin to use the device: settings are resolved in processes that never run a model.
        """
        self.threads = threads or 1
        self.index = index

    @classmethod
    def is_available(cls) -> bool:
        """Return whether this machine has such a device."""
        return True

    @classmethod
    def report(cls) -> str:
        """Return what `pagoda doctor` says of the devices of this kind, in lines; empty for nothing."""
        return ""

    # For settings, before a model is loaded

    def fit_dtype(self, dtype: str, asked: str) -> str:
        """Return the dtype to compute in, in place of `dtype`.

        asked: the setting, "auto" if it was left to the model. Raises ConfigError if the device does not have that.
        """
        return dtype

    def chosen_kernels(self, name: str) -> str:
        """Return the kernels that the setting `name` means on this device, if they are available."""
        return self.kernels[0] if name == "auto" else name

    def summary(self) -> str:
        """Return how `pagoda plan` describes the device."""
        return self.name

    def free_bytes(self) -> int:
        """Return the bytes that this process can still allocate on it. Raises ConfigError if it is not there."""
        raise NotImplementedError(f"{type(self).__name__} does not say how much memory is free")

    @property
    def margin_bytes(self) -> int:
        """Bytes of it that are kept free, for what cannot be measured."""
        return 0

    # For a process that runs a model

    @property
    def device(self) -> "torch.device":
        """Where its tensors are."""
        import torch

        return torch.device(self.name, self.index)

    def prepare(self) -> None:
        """Set the process up for running steps. Raises ConfigError if the device is not there."""

    def make_ops(self, name: str = "auto", max_model_len: int = 8192, batch_invariant: bool = False) -> "Ops":
        """Return the kernels that a setting names. Raises ConfigError for those that are not available: see select."""
        from pagoda.kernels.select import select_ops

        return select_ops(name, self, max_model_len, batch_invariant)

    def make_capture(self, ops: "Ops") -> Capture | None:
        """Return what captures steps computed by `ops` as graphs; None if they are not captured.

        Only ops that neither wait for the device nor depend on the values in their inputs can be.
        """
        return None

    def free_bytes_beside(self, run: Callable[[], object]) -> int:
        """Return the bytes that stay free at the moment at which `run` takes most, less the margin.

        What `run` leaves behind counts, too. Here that is all that can be seen.
        """
        run()
        self.check()
        return max(0, self.free_bytes() - self.margin_bytes)

    def zeros(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Return memory for a KV pool."""
        import torch

        return torch.zeros(shape, dtype=dtype, device=self.device)

    # Copies. Those of KV blocks run next to the computations, on devices that can do both.

    def to_host(self, tensors: "Sequence[torch.Tensor]") -> HostCopy:
        """Begin to copy tensors to the host, after the computations submitted so far."""
        return OnHost([tensor.cpu().numpy() for tensor in tensors])

    def new_host_memory(self, num_bytes: int) -> "torch.Tensor":
        """Return uint8 zeros [num_bytes] that `store` and `load` can use. Raises MemoryError or OSError."""
        import torch

        return lazy_zeros((num_bytes,), torch.uint8)

    def store(self, source: "torch.Tensor", targets: "Sequence[torch.Tensor]") -> None:
        """Begin to copy the rows of `source` to host memory, after the computations submitted so far.

        Later computations do not wait. source: [k, n], which must not change any more.   targets: [k1, n], [k2, n] ...
        """
        for rows, target in zip(source.split([len(target) for target in targets]), targets, strict=True):
            target.copy_(rows)

    def load(self, sources: "Sequence[torch.Tensor]") -> "torch.Tensor":
        """Begin to copy rows of host memory to the device, after earlier calls of `store`; return [k, n].

        Only computations submitted from now on wait for it; those submitted before run meanwhile.
        """
        import torch

        return torch.cat(list(sources)).to(self.device)

    def check(self) -> None:
        """Wait for everything that was submitted. Raises WorkerDied if the device can compute nothing any more."""


class OnHost:
    """Results that are on the host already."""

    def __init__(self, arrays: "list[np.ndarray]") -> None:
        self._arrays = arrays

    def is_done(self) -> bool:
        return True

    def wait(self) -> "list[np.ndarray]":
        return self._arrays


def lazy_zeros(shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    """Return zeros in an anonymous mapping: the system provides each page when it is first written.

    Not on huge pages: zeroing two of them per layer when a new KV block crosses into them would delay a step by 0.1 s
    in a virtual machine.
    """
    import torch

    mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return cast("torch.Tensor", torch.frombuffer(mapping, dtype=dtype).view(shape))  # keeps the mapping alive
