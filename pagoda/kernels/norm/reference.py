"""The definition of RMS and layer normalisation: in float32 from end to end, rounded once."""

import torch
import torch.nn.functional as F


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


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """See ForwardOps.gated_rms_norm."""
    wide, gates = x.float(), F.silu(gate.reshape(x.shape).float())
    if gate_first:
        wide = wide * gates
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    normed = normed * weight.float().reshape(-1, x.shape[-1])
    return (normed if gate_first else normed * gates).flatten(1).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x [T, D] - mean) / sqrt(variance + eps) * weight [D] + bias [D], in x's dtype."""
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normed."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
