"""Host memory whose pages cost nothing until they are written."""

import math
import mmap

import torch


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in an anonymous mapping: the system provides each page when it is first written.

    Not on huge pages: zeroing two of them per layer when a new KV block crosses into them would delay a step by 0.1 s
    in a virtual machine.
    """
    mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)  # keeps the mapping alive
