"""Kernels around the conversions of 8-bit floats, which Triton compiles only from a file."""

import torch
import triton.language as tl

from pagoda.kernels.triton_support import from_e4m3, jit, to_e4m3


@jit
def _convert(x, out, size, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0)
    if WRITE:
        tl.store(out + at, to_e4m3(value), mask=at < size)
    else:
        tl.store(out + at, from_e4m3(value, tl.float32), mask=at < size)


def read(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N] -> float32 [N], 2^-8 times the numbers."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    _convert[(1,)](codes, out, len(codes), False, 256)
    return out


def write(x: torch.Tensor) -> torch.Tensor:
    """float32 [N] -> uint8 [N]."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _convert[(1,)](x, out, len(x), True, 256)
    return out
