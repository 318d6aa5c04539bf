"""RecurrentLayer: what layers share that keep a state per row in place of keys and values."""

from collections.abc import Sequence

from pagoda.base.errors import ConfigError
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVShape
from pagoda.layers.kv import KVDeclaration, KVPlace
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Taps, Vector
from pagoda.ops.batch import AttentionMetadata, ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


class RecurrentLayer(Module):
    """out_proj(mix(x)), where `mix` sees the tokens before by a convolution, and perhaps by a matrix per head.

    taps, bias: of the convolution.   place: of its states; see Attention.
    """

    out_proj: Linear

    def __init__(
        self, name: str, channels: int, num_taps: int, bias: bool = False, matrices: tuple[int, ...] = ()
    ) -> None:
        """name: of such layers, in errors.   num_taps: tokens that the convolution sees, itself included.

        matrices: [heads, keys, values], what the state has besides the convolution's window; () for none.
        """
        self.taps = Parameter[Tensor](Taps(channels, num_taps))
        self.bias = Parameter[Tensor](Vector(channels)) if bias else None
        self.kv = KVDeclaration(KVGroupKind.STATE, STATE_WINDOW, KVShape(num_taps - 1, channels, 0, matrices))
        self.place = KVPlace()
        self._name = name

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Raise ConfigError: its heads or channels are not divided yet."""
        if ranks.size > 1:
            raise ConfigError(
                f"tensor_parallel_size={ranks.size} does not go with {self._name} yet; leave it out, or take "
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
        y = self.mix(ops, x, kv[self.place.index], batch.metadata[self.place.group])
        if last:
            y, residual = batch.outputs.of(ops.select_rows, y, residual)
        return self.out_proj(ops, y), residual

    def mix(self, ops: ForwardOps, x: Tensor, states: KVLayer, metadata: AttentionMetadata) -> Tensor:
        """x [T, hidden] -> what `out_proj` takes. Leaves the states after the tokens."""
        raise NotImplementedError

    def convolve(
        self, ops: ForwardOps, x: Tensor, states: KVLayer, metadata: AttentionMetadata, silu: bool = True
    ) -> Tensor:
        """x [T, channels] or [T, 1, channels] -> [T, channels].   silu: of the sums."""
        bias = None if self.bias is None else self.bias.value
        return ops.short_conv(x, self.taps.value, bias, states, metadata, silu)
