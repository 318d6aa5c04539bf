"""Memory on huge pages, if the system has them: one page-table entry covers 2 MiB instead of 4 KiB."""

import contextlib
import ctypes
import mmap

import torch

_HUGE_PAGE = 2 << 20


def huge_zeros(num_bytes: int) -> torch.Tensor:
    """Return uint8 zeros [num_bytes], aligned to 2 MiB; pages are allocated when they are first written.

    The memory is private, because shared anonymous memory has huge pages only if an administrator enables them.
    """
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE
    if num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the Linux kernel was built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, offset - offset % mmap.PAGESIZE, size - _HUGE_PAGE)
    # The tensor keeps `mapping` alive; it is unmapped when its last view is gone.
    return torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + num_bytes]
