"""The definition of RMS normalisation: in float32 from end to end, rounded once."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * weight [D] (or * (1 + weight)), in x's dtype.

    A weight [H D] of x [T, H, D] norms all heads of a token as one vector.
    """
    if weight.shape[0] != x.shape[-1]:
        return rms_norm(x.flatten(1), weight, eps, unit_offset).view(x.shape)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    factor = 1.0 + weight.float() if unit_offset else weight.float()
    return (normed * factor).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normed."""
    total = x + residual
    return rms_norm(total, weight, eps, unit_offset), total
