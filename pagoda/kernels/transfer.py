"""Moving numpy arrays to a device."""

import numpy as np
import torch

_ALIGN = 16  # bytes: alignment of each tensor in the bulk copy

_TORCH_TYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32, "<f8": torch.float64}


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`: on a CPU, views of the same memory; otherwise, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return bulk_copy(arrays, device)


def bulk_copy(arrays: list[np.ndarray], device: torch.device, memory: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Transfer arrays of int32, int64, float32 or float64 to `device` in one copy, pinned and not waited for.

    Return them as views of one tensor.   memory: uint8, on the device, for that tensor; if it is too small, or None,
    the tensor is a new one.
    """
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    # New for each copy: torch keeps pinned memory for later, and gives out none whose copy is not complete.
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if memory is None or size > memory.shape[0]:
        moved = staging.to(device, non_blocking=True)
    else:
        moved = memory[:size].copy_(staging, non_blocking=True)
    return [
        moved[offset : offset + array.nbytes].view(_TORCH_TYPES[array.dtype.str]).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
