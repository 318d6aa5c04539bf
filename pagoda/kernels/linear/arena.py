"""Memory for weights: large, aligned, on huge pages."""

import torch

from pagoda.kernels.native.huge_pages import huge_zeros

_CHUNK = 64 << 20
_ALIGN = 4096  # so that no two weights share a page's worth of prefetching


class WeightArena:
    """Hands out byte tensors, one after the other in a few large mappings; never takes one back singly.

    A mapping is given back to the system when all tensors in it are gone. Weights that are read in turn stand in turn.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros, aligned to 4096."""
        if self._used + num_bytes > self._chunk.numel():
            self._chunk, self._used = huge_zeros(max(num_bytes, _CHUNK)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // _ALIGN) * _ALIGN
        return part
