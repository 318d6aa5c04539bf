"""Moving numpy arrays to a device."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from pagoda.base.errors import InvariantBroken

_ALIGN = 16  # bytes: alignment of each tensor in the bulk copy

_TORCH_TYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32, "<f8": torch.float64}


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`: on a CPU, views of the same memory; otherwise, in one copy."""
    if _is_host(device):
        return [torch.from_numpy(array) for array in arrays]
    return bulk_copy(arrays, device)


def _is_host(device: torch.device) -> bool:
    """Return whether its memory is that of numpy's arrays, as torch says: kernels do not know the worker's Device."""
    return device.type == "cpu"


def parts_to_device(
    parts: Sequence[Sequence[np.ndarray]], device: torch.device, memory: torch.Tensor | None = None
) -> list[list[torch.Tensor]]:
    """Return the arrays of each part on `device`, all moved together: see `to_device`.   memory: see `bulk_copy`."""
    arrays = [array for part in parts for array in part]
    tensors = iter(to_device(arrays, device) if memory is None else bulk_copy(arrays, device, memory))
    return [list(islice(tensors, len(part))) for part in parts]


def bulk_copy(arrays: list[np.ndarray], device: torch.device, memory: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Transfer arrays of int32, int64, float32 or float64 to `device` in one copy, pinned and not waited for.

    Return them as views of one tensor.   memory: uint8, on the device, for that tensor; None: it is a new one.
    Raises InvariantBroken if the memory is too small.
    """
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    if memory is not None and size > memory.shape[0]:
        raise InvariantBroken(f"inputs of {size} bytes are for {memory.shape[0]} bytes of memory")
    # New for each copy: torch keeps pinned memory for later, and gives out none whose copy is not complete.
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=not _is_host(device))
    view = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if memory is None:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    moved = memory[:size].copy_(staging, non_blocking=True)
    return [
        moved[offset : offset + array.nbytes].view(_TORCH_TYPES[array.dtype.str]).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
