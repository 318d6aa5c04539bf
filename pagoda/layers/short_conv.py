"""ShortConv: a gated convolution over the last few tokens, in place of attention (LFM2)."""

from pagoda.layers.linear import Linear
from pagoda.layers.parameter import Part
from pagoda.layers.recurrent import RecurrentLayer
from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class ShortConv(RecurrentLayer):
    """out_proj(c * convolution(b * x)), where in_proj gives b, c and x.

    num_taps: tokens that the convolution sees, itself included.   bias: of the projections and the convolution.
    """

    def __init__(self, hidden_size: int, num_taps: int, bias: bool = False) -> None:
        self.in_proj = Linear(hidden_size, (Part("in_proj", 3 * hidden_size),), bias)
        super().__init__("short convolutions", hidden_size, num_taps, bias)
        self.out_proj = Linear(hidden_size, (Part("out_proj", hidden_size),), bias)
        self.hidden_size = hidden_size

    def mix(self, ops: ForwardOps, x: Tensor, states: KVLayer, metadata: AttentionMetadata) -> Tensor:
        y, size = self.in_proj(ops, x), self.hidden_size
        b, c, x = (ops.select_heads(y, part * size, 1, size) for part in range(3))
        return ops.multiply(self.convolve(ops, ops.multiply(b, x), states, metadata, silu=False), c)
