"""Memory for weights: large, aligned, on huge pages."""

from typing import Protocol

import torch

from pagoda.kernels.native.huge_pages import huge_zeros

_CHUNK = 64 << 20
_ALIGN = 4096  # bytes: the hardware prefetcher of one weight never reads into the next


class Arena(Protocol):
    """Where packed weights are stored."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes], zeros, aligned to 64."""
        ...


class SeparateTensors:
    """An Arena of separate tensors, each freed when it is no longer used."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class WeightArena:
    """Allocates byte tensors one after the other in a few large mappings; single tensors are never freed.

    A mapping is unmapped when all its tensors are gone. Weights that are read one after the other are adjacent.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes], zeros, aligned to 4096."""
        if self._used + num_bytes > self._chunk.numel():
            self._chunk, self._used = huge_zeros(max(num_bytes, _CHUNK)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // _ALIGN) * _ALIGN
        return part
