"""The definition of the activations: in float32, rounded once."""

import math

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] (gate then up) -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] (gate then up) -> gelu_tanh(gate) * up, [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] (gate then up) -> gelu(gate) * up, [T, I]; gelu with the error function."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu(gate) * up).to(gate_up.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * erfc(-x / sqrt(2)) / 2.

    Not F.gelu: its 1 + erf(x / sqrt(2)) cancels for negative x, by an amount that depends on the CPU's vectors.
    """
    return (0.5 * x.float() * torch.erfc(x.float() * -math.sqrt(0.5))).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2."""
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x))."""
    return F.silu(x.float()).to(x.dtype)


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)."""
    return torch.relu(x)


def xielu(x: torch.Tensor, above: float, below: float, linear: float, limit: float) -> torch.Tensor:
    """above x^2 + linear x for x above 0, below (exp(min(x, limit)) - 1 - x) + linear x elsewhere."""
    y = x.float()
    curve = torch.where(y > 0, above * y * y, below * (torch.expm1(y.clamp(max=limit)) - y))
    return (curve + linear * y).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x.float()).to(x.dtype)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh(x)."""
    return torch.tanh(x.float()).to(x.dtype)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)
