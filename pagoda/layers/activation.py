"""Which activations a gated MLP may have."""

from enum import Enum


class Activation(Enum):
    """The gated activation of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
