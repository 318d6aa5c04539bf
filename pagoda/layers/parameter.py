"""Parameters: what layers declare of their weights.

Loading, quantising, tensor-parallel shards, the memory estimate and LoRA targets are derived from these declarations;
none of them knows a layer. A parameter's value is opaque: loading puts it in, ops read it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np

from pagoda.layers.rope_config import RopeConfig
from pagoda.ops.tensor import Tensor

T = TypeVar("T")


class Axis(Enum):
    """The dimension along which tensor parallelism divides a matrix."""

    OUT = "out"  # rows: each rank computes some of the outputs
    IN = "in"  # columns: each rank computes a share of every output


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix that the checkpoint stores under their own name.

    name: in the checkpoint, in place of the fused layer's own name; "" for that name. Adjacent parts of one name are
        rows of one stored tensor, in that order.
    unit: rows that a shard must not divide (the rows of a head).   replicated: if there are fewer units than ranks,
        several ranks hold the same unit (KV heads).
    rotary: the embedding that turns the rows, whose `head_order` is that of the checkpoint in each unit.
    alternates: the parts of the name alternate in the stored tensor, unit by unit: a head of q, of k, of v, and so on.
    has_bias: False where the other parts have a bias and this one has none: it is held as zeros.
    block: each unit is a block of rows of the stored tensor, None for as many rows as a unit has.
    """

    name: str
    rows: int
    unit: int = 1
    rotary: RopeConfig | None = None
    replicated: bool = False
    alternates: bool = False
    has_bias: bool = True
    block: "StoredBlock | None" = None

    def unit_order(self, interleaved: bool = False) -> tuple[int, ...] | None:
        """See RopeConfig.head_order; None also if no rotary embedding turns the rows."""
        return None if self.rotary is None else self.rotary.head_order(self.unit, interleaved)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Where a unit of a part is in the stored tensor: rows of each `step`, beginning at `first`.

    is_transposed: they are the columns of the unit, and their columns are its rows.
    """

    first: int
    step: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A matrix [rows, columns] whose rows are looked up: kept in the compute dtype, or as the codes of a GGUF.

    skipped: rows of the stored matrix that come first and are left out.   is_divided: tensor parallelism divides the
    rows, as it does those of a matrix along OUT.
    by_position: it has a row for every position that a step can reach. Those past the stored ones are 0: a step in
    flight may compute a token past the end of a finished row, which is not used.
    """

    rows: int
    columns: int
    skipped: int = 0
    is_divided: bool = False
    by_position: bool = False


@dataclass(frozen=True, slots=True)
class Vector:
    """One value per element, in the compute dtype.

    unit_offset: the layer multiplies by 1 + value.   zeros: the checkpoint has none; all values are 0.
    negative_exp: the layer takes -exp of the checkpoint's value.
    is_float32: in float32, whatever the compute dtype.   is_number: it has one element, and is held as a Python float.
    unit, rotary: its elements belong to rows of heads so large, in the order of those; see Part.
    """

    size: int
    unit_offset: bool = False
    zeros: bool = False
    negative_exp: bool = False
    is_float32: bool = False
    is_number: bool = False
    unit: int = 1
    rotary: RopeConfig | None = None


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Rows of a stored matrix: row i is `plus[i]`, less `minus[i]` if there is one.

    path: of the stored matrix, as paths in the tree.   num_rows: of that matrix.
    """

    path: str
    num_rows: int
    plus: tuple[int, ...]
    minus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [rows, columns] of a linear layer, with its bias; prepared for the kernels.

    parts: along the rows.   unit: columns that a shard must not divide.   num_experts: how many such matrices are
    stacked, 0 for a plain one.   quantizable: False keeps it in the compute dtype.   tied: the parameter of a Table
    whose values it shares.   picked: the rows are made from rows of another stored matrix.
    kernel: the shape of a row in the checkpoint, where that is a convolution whose inputs are laid out so; its elements
    are the columns.   taps: the checkpoint has so many columns of each input channel next to each other, which are here
    a tap of all channels after the other; 0 where they are in the order of the inputs.
    in_pairs: there are two parts, gates and what they multiply.
    """

    parts: tuple[Part, ...]
    columns: int
    bias: bool = False
    shard: Axis | None = None
    unit: int = 1
    num_experts: int = 0
    quantizable: bool = True
    tied: "Parameter[Tensor] | None" = None
    picked: PickedRows | None = None
    kernel: tuple[int, ...] = ()
    taps: int = 0
    in_pairs: bool = False

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def stored_units(self, number: int, alternates: bool = True) -> range:
        """Return where in its stored tensor each unit of part `number` begins.

        alternates: whether parts that alternate in the checkpoints of transformers do so in this one.
        """
        part = self.parts[number]
        same = [at for at, other in enumerate(self.parts) if other.name == part.name]
        if part.alternates and alternates:
            first, step = (sum(self.parts[at].unit for at in some) for some in (same[: same.index(number)], same))
        else:
            first, step = sum(self.parts[at].rows for at in same if at < number), part.unit
        return range(first, first + part.rows // part.unit * step, step)

    def part_paths(self, path: str, expert: int = 0) -> list[str]:
        """Return the tree paths of the parts, given the parameter's own path: siblings of the layer that owns it.

        expert: which of a stack.
        """
        layer = path.rpartition(".")[0]
        parent = layer.rpartition(".")[0] + (f".{expert}" if self.num_experts else "")
        return [f"{parent}.{part.name}" if part.name else layer for part in self.parts]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of the rotary embedding, computed at load, float32.

    scaled_by_checkpoint: divide the frequencies by the checkpoint's factors, if it has such a tensor (GGUF).
    num_positions: 0: as many as a sequence may have.
    """

    rope: RopeConfig
    head_dim: int
    scaled_by_checkpoint: bool
    num_positions: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BiasTable:
    """A bias per head and distance, float32 [num_heads, distances], made at load from the stored [num_buckets, heads].

    buckets: int64 [distances], the row of each.
    """

    num_heads: int
    num_buckets: int
    buckets: np.ndarray


@dataclass(frozen=True, slots=True)
class Taps:
    """Weights of a convolution over tokens in each channel by itself, in the compute dtype.

    Stored [channels, 1, taps], the newest token last; held as [taps, channels].
    factors: adjacent runs of channels, and what the taps of each are multiplied by; empty for 1.
    """

    channels: int
    taps: int
    factors: tuple[tuple[int, float], ...] = ()


Declaration = Table | Vector | Matrix | RotaryTable | BiasTable | Taps


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """What a rank holds of a matrix or a table.

    rows: of each part; of a table, all rows are one part.   columns: of the matrix.   bias: whether this rank adds it.
    """

    rows: tuple[range, ...]
    columns: range
    bias: bool

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(rows) for rows in self.rows), len(self.columns)


def whole_of(declared: Matrix | Table) -> MatrixShard:
    """Return the share of a rank that holds all of it."""
    if isinstance(declared, Table):
        return MatrixShard((range(declared.rows),), range(declared.columns), False)
    return MatrixShard(tuple(range(part.rows) for part in declared.parts), range(declared.columns), declared.bias)


class Parameter(Generic[T]):
    """A declaration and, once loaded, the value that the layer passes to its ops.

    shard: what this rank holds of a Matrix or Table, all of it unless `layers/sharding.py` has divided the tree.
    """

    __slots__ = ("_shard", "_value", "declared")

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self._value: T | None = None
        self._shard = whole_of(declared) if isinstance(declared, Matrix | Table) else None

    @property
    def shard(self) -> MatrixShard:
        assert self._shard is not None, "only matrices and tables are divided"
        return self._shard

    def take(self, shard: MatrixShard) -> None:
        """Set what this rank holds, before loading."""
        self._shard = shard

    @property
    def value(self) -> T:
        assert self._value is not None, "the model's weights are not loaded"
        return self._value

    def fill(self, value: T) -> None:
        """Set the value. Loading does this once, or twice for a table that then shares the memory of a tied weight."""
        self._value = value
