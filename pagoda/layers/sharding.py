"""The rows and columns of a matrix that a tensor-parallel rank holds: a pure function of its declaration."""

import math
from dataclasses import dataclass

from pagoda.base.errors import ConfigError
from pagoda.layers.parameter import Axis, Matrix, Part


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """rows: of each part.   columns: of the matrix.   bias: whether this rank adds it."""

    rows: tuple[range, ...]
    columns: range
    bias: bool


def shard_of(matrix: Matrix, rank: int, num_ranks: int, group: int = 1) -> MatrixShard:
    """Return the share of `rank`.

    group: columns that share a quantisation scale; boundaries along a divided dimension without heads are multiples of
    it, so that the outputs of one layer are the inputs that the next one expects.
    Raises ConfigError where heads or groups do not divide by the ranks.
    """
    whole = MatrixShard(tuple(range(part.rows) for part in matrix.parts), range(matrix.columns), matrix.bias)
    if matrix.shard is None or num_ranks == 1:
        return whole
    if matrix.shard is Axis.OUT:
        rows = tuple(_rows_of(part, rank, num_ranks, group) for part in matrix.parts)
        return MatrixShard(rows, whole.columns, matrix.bias)
    columns = _columns_of(matrix, rank, num_ranks, group)
    # The ranks' partial outputs are summed, so only one rank adds the bias.
    return MatrixShard(whole.rows, columns, matrix.bias and rank == 0)


def _rows_of(part: Part, rank: int, num_ranks: int, group: int) -> range:
    if part.unit == 1:
        return _divided(part.rows, rank, num_ranks, group, part.name)
    units = part.rows // part.unit
    if units % num_ranks == 0:
        share = part.rows // num_ranks
        return range(rank * share, (rank + 1) * share)
    if part.replicated and num_ranks % units == 0:
        unit = rank * units // num_ranks
        return range(unit * part.unit, (unit + 1) * part.unit)
    raise ConfigError(f"tensor_parallel_size={num_ranks} does not divide the {units} heads of {part.name}")


def _columns_of(matrix: Matrix, rank: int, num_ranks: int, group: int) -> range:
    name, columns = "+".join(part.name for part in matrix.parts) or "a layer's input", matrix.columns
    if matrix.unit == 1:
        return _divided(columns, rank, num_ranks, group, name)
    units = columns // matrix.unit
    if units % num_ranks:
        raise ConfigError(f"tensor_parallel_size={num_ranks} does not divide the {units} heads of {name}")
    share = columns // num_ranks
    if share % group:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} would cut the quantisation groups of {group} in {name} ({share} columns "
            "per rank); use fewer ranks or weights that are not quantised"
        )
    return range(rank * share, (rank + 1) * share)


def _divided(size: int, rank: int, num_ranks: int, group: int, name: str) -> range:
    """Divide as evenly as whole groups allow; the last group may be partial."""
    groups = math.ceil(size / group)
    if groups < num_ranks:
        raise ConfigError(f"tensor_parallel_size={num_ranks} is more than the {groups} groups of {group} in {name}")
    first, end = (min(size, groups * at // num_ranks * group) for at in (rank, rank + 1))
    return range(first, end)
