"""Memory for weights: large, aligned, on huge pages where the kernel has them."""

import ctypes
import mmap

import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGN = 4096  # so that no two weights share a page's worth of prefetching


class WeightArena:
    """Hands out byte tensors, one after the other in a few large mappings; never takes one back singly.

    A mapping is given back to the system when all tensors in it are gone. Weights that are read in turn stand in turn,
    and one entry of the CPU's page table covers 2 MiB of them instead of 4 KiB.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros, aligned to 4096."""
        if self._used + num_bytes > self._chunk.numel():
            self._chunk, self._used = _map(max(num_bytes, _CHUNK)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // _ALIGN) * _ALIGN
        return part


def _map(num_bytes: int) -> torch.Tensor:
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    offset = -address % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE, offset - offset % mmap.PAGESIZE, size - _HUGE_PAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + size - _HUGE_PAGE]
