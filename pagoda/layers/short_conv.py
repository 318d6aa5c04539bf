"""ShortConv: a gated convolution over the last few tokens, in place of attention (LFM2)."""

from collections.abc import Sequence

from pagoda.base.errors import ConfigError
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVShape
from pagoda.layers.kv import KVDeclaration, KVPlace
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Part, Taps, Vector
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


class ShortConv(Module):
    """out_proj(c * convolution(b * x)), where in_proj gives b, c and x.

    num_taps: tokens that the convolution sees, itself included.   bias: of the projections and the convolution.
    place: of its states; see Attention.
    """

    def __init__(self, hidden_size: int, num_taps: int, bias: bool = False) -> None:
        self.in_proj = Linear(hidden_size, (Part("in_proj", 3 * hidden_size),), bias)
        self.taps = Parameter[Tensor](Taps(hidden_size, num_taps))
        self.bias = Parameter[Tensor](Vector(hidden_size)) if bias else None
        self.out_proj = Linear(hidden_size, (Part("out_proj", hidden_size),), bias)
        self.hidden_size = hidden_size
        self.kv = KVDeclaration(KVGroupKind.STATE, STATE_WINDOW, KVShape(num_taps - 1, hidden_size, 0))
        self.place = KVPlace()

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Raise ConfigError: its channels are not divided yet."""
        if ranks.size > 1:
            raise ConfigError(
                f"tensor_parallel_size={ranks.size} does not go with short convolutions yet; leave it out, or take "
                "pipeline_parallel_size"
            )

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """See Attention."""
        y, size = self.in_proj(ops, x), self.hidden_size
        b, c, x = (ops.select_heads(y, part * size, 1, size) for part in range(3))
        states, metadata = kv[self.place.index], batch.metadata[self.place.group]
        bias = None if self.bias is None else self.bias.value
        y = ops.multiply(ops.short_conv(ops.multiply(b, x), self.taps.value, bias, states, metadata), c)
        if last:
            y, residual = (ops.select_rows(rows, batch.tail.index) for rows in (y, residual))
        return self.out_proj(ops, y), residual
