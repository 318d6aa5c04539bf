"""Activation functions, plain and in gated MLPs."""

from enum import Enum

from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class Activation(Enum):
    """The activation function of a layer. A gated MLP may have SILU, GELU or GELU_TANH."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"  # with the error function
    RELU = "relu"
    TANH = "tanh"
    IDENTITY = "identity"


def activate(ops: ForwardOps, activation: Activation, x: Tensor) -> Tensor:
    """x [T, I] -> the same shape."""
    match activation:
        case Activation.SILU:
            return ops.silu(x)
        case Activation.GELU_TANH:
            return ops.gelu_tanh(x)
        case Activation.GELU:
            return ops.gelu(x)
        case Activation.RELU:
            return ops.relu(x)
        case Activation.TANH:
            return ops.tanh(x)
        case Activation.IDENTITY:
            return x


def gate(ops: ForwardOps, activation: Activation, gate_up: Tensor) -> Tensor:
    """[T, 2 I] (gate then up) -> activation(gate) * up, [T, I]."""
    match activation:
        case Activation.SILU:
            return ops.silu_mul(gate_up)
        case Activation.GELU_TANH:
            return ops.gelu_tanh_mul(gate_up)
        case Activation.GELU:
            return ops.gelu_mul(gate_up)
        case _:
            raise NotImplementedError(f"no gated MLP has the activation {activation.value}")
