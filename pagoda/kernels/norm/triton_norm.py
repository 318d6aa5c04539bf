"""RMS and layer normalisation in Triton: one program per vector, which is read once and held in registers."""

import torch
import triton
import triton.language as tl

from pagoda.kernels.triton_support import jit


@jit
def _load_sum(x, residual, total, begin, row, at, inside, size, ADD: tl.constexpr):
    """Return a vector of x in float32; with ADD, of x + residual, rounded to x's dtype and stored to `total`."""
    value = tl.load(x + begin + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(value.dtype)
        tl.store(total + row * size + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    return wide


@jit
def _rms_norm(
    x, residual, weight, out, total, token_stride, head_stride, num_heads, size, eps,
    UNIT_OFFSET: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    begin = row // num_heads * token_stride + row % num_heads * head_stride
    wide = _load_sum(x, residual, total, begin, row, at, inside, size, ADD)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    tl.store(out + row * size + at, (wide * inverse * factor).to(out.dtype.element_ty), mask=inside)


@jit
def _layer_norm(x, residual, weight, bias, out, total, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    wide = _load_sum(x, residual, total, row * size, row, at, inside, size, ADD)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (centred * inverse * factor + offset).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """See reference.rms_norm. x: [T, D] or [T, H, D], its last dimension contiguous."""
    if weight.shape[0] != x.shape[-1]:
        return rms_norm(x.flatten(1), weight, eps, unit_offset).view(x.shape)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    size = x.shape[-1]
    _rms_norm[(x.numel() // size,)](
        x, x, weight, out, out, x.stride(0), head_stride, num_heads, size, eps, unit_offset, False, **_launch(size)
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm. x, residual: [T, D], contiguous."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[1]
    _rms_norm[(x.shape[0],)](
        x, residual, weight, out, total, size, 0, 1, size, eps, unit_offset, True, **_launch(size)
    )  # fmt: skip
    return out, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.layer_norm. x: [T, D], contiguous."""
    out = torch.empty_like(x)
    size = _check(x, weight, bias)
    _layer_norm[(x.shape[0],)](x, x, weight, bias, out, out, size, eps, False, **_launch(size))
    return out


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_layer_norm. x, residual: [T, D], contiguous."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    size = _check(x, weight, bias)
    _layer_norm[(x.shape[0],)](x, residual, weight, bias, out, total, size, eps, True, **_launch(size))
    return out, total


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> int:
    """Return the size of a vector. Raises ValueError for a weight or bias of another."""
    size = x.shape[1]
    if weight.shape != (size,) or bias.shape != (size,):
        raise ValueError(f"layer_norm: weight {tuple(weight.shape)} and bias {tuple(bias.shape)} must be [{size}]")
    return size


def _launch(size: int) -> dict[str, int]:
    """Return the block that holds a vector, and the warps that share it: they follow from `size` alone."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
