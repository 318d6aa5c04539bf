"""Streams: what a device copies to and from the host next to its computations."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pagoda.worker.host_memory import lazy_zeros


class HostCopy(Protocol):
    """Results on their way to the host."""

    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, at once. Does not raise."""
        ...

    def wait(self) -> list[np.ndarray]:
        """Wait for what was computed up to this copy; return the arrays. Any thread may call it, several times."""
        ...


class Streams(Protocol):
    """The copies of one device. What the host submits to the device otherwise is called its computations here."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Begin to copy tensors to the host, after the computations submitted so far."""
        ...

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 zeros [num_bytes] that `store` and `load` can use. Raises MemoryError or OSError."""
        ...

    def store(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Begin to copy the rows of `source` to host memory, after the computations submitted so far.

        Later computations do not wait. source: [k, n], which must not change any more.   targets: [k1, n], [k2, n] ...
        """
        ...

    def load(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Begin to copy rows of host memory to the device, after earlier calls of `store`; return [k, n].

        Only computations submitted from now on wait for it; those submitted before run meanwhile.
        """
        ...

    def check(self) -> None:
        """Wait for everything that was submitted. Raises WorkerDied if the device can compute nothing any more."""
        ...


class HostStreams:
    """Of a CPU: everything is done when a call returns."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        return OnHost([tensor.numpy() for tensor in tensors])

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        return lazy_zeros((num_bytes,), torch.uint8)

    def store(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        for rows, target in zip(source.split([len(target) for target in targets]), targets, strict=True):
            target.copy_(rows)

    def load(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(sources))

    def check(self) -> None:
        pass


class OnHost:
    """Results that are on the host already."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[np.ndarray]:
        return self._arrays
