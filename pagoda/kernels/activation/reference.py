"""The definition of the activations: in float32, rounded once."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pagoda.ops.declare import Activation


def _gelu(x: torch.Tensor) -> torch.Tensor:
    # Not F.gelu: its 1 + erf(x / sqrt(2)) cancels for negative x, by an amount that depends on the CPU's vectors.
    return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.IDENTITY: lambda x: x,
    Activation.SILU: F.silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: torch.relu,
    Activation.RELU_SQUARED: lambda x: torch.relu(x).square(),
    Activation.SIGMOID: torch.sigmoid,
    Activation.TANH: torch.tanh,
}


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """kind(x), element by element."""
    return _FUNCTIONS[kind](x.float()).to(x.dtype)


def gate(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """[T, 2 I] (gate then up) -> kind(gate) * up, [T, I]."""
    gates, up = gate_up.float().chunk(2, dim=-1)
    return (_FUNCTIONS[kind](gates) * up).to(gate_up.dtype)


def xielu(x: torch.Tensor, above: float, below: float, linear: float, limit: float) -> torch.Tensor:
    """above x^2 + linear x for x above 0, below (exp(min(x, limit)) - 1 - x) + linear x elsewhere."""
    y = x.float()
    curve = torch.where(y > 0, above * y * y, below * (torch.expm1(y.clamp(max=limit)) - y))
    return (curve + linear * y).to(x.dtype)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)
