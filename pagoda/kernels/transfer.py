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


def bulk_copy(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Transfer arrays of int32, int64, float32 or float64 to `device` in one copy, pinned and not waited for.

    Return them as views of one tensor.
    """
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staging.to(device, non_blocking=True)
    return [
        moved[offset : offset + array.nbytes].view(_TORCH_TYPES[array.dtype.str]).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
