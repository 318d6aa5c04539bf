"""Rotary embedding: tables of cos and sin that layers share."""

from dataclasses import dataclass

from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, RotaryTable
from pagoda.layers.rope_config import RopeConfig
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTables:
    """cos, sin: float32 [num_positions, head_dim / 2].   query_factors: float32 [num_positions, 1], None for 1."""

    cos: Tensor
    sin: Tensor
    query_factors: Tensor | None = None


class Rotary(Module):
    """The rotary embedding of heads of one size. Layers with the same rope share one object, and so one table.

    scaled_by_checkpoint, num_positions: see `RotaryTable`.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, scaled_by_checkpoint: bool = True, num_positions: int = 0
    ) -> None:
        self.rope = rope
        self.tables = Parameter[RotaryTables](RotaryTable(rope, head_dim, scaled_by_checkpoint, num_positions))

    @property
    def cos(self) -> Tensor:
        return self.tables.value.cos

    @property
    def sin(self) -> Tensor:
        return self.tables.value.sin

    @property
    def query_factors(self) -> Tensor | None:
        return self.tables.value.query_factors
