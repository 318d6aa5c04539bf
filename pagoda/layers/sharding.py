"""Tensor parallelism: make a tree the share of one rank, and the rows and columns of a matrix that a rank holds."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagoda.base.errors import ConfigError
from pagoda.layers.module import Module, walk
from pagoda.layers.parameter import Axis, Matrix, MatrixShard, Parameter, Part, Table, whole_of
from pagoda.ops.tensor import RankGroup


@dataclass(frozen=True, slots=True)
class RankNumber:
    """A RankGroup without the others: enough to divide a tree whose forward is not run."""

    rank: int
    size: int


ALONE = RankNumber(0, 1)
"""A rank that computes all of its layers."""


@runtime_checkable
class Divisible(Protocol):
    """A layer of which each rank may have a share."""

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Become the share of `ranks.rank`, before loading.   group: see `shard_of`. Raises ConfigError."""
        ...


def divide(root: Module, ranks: RankGroup, group: int = 1) -> None:
    """Make a tree, whose weights are not loaded, the share of one rank; its forward then computes with the others.

    group: columns that share a quantisation scale, in any matrix that is divided along them.
    Raises ConfigError that names what does not divide; some layers are divided then.
    """
    for _, module in walk(root):
        if isinstance(module, Divisible):
            module.divide(ranks, group)


def divide_weight(parameter: Parameter[Any], ranks: RankGroup, group: int) -> bool:
    """Make a matrix or a table the share of a rank, as its declaration says. Return whether it is divided."""
    declared = parameter.declared
    if isinstance(declared, Matrix):
        parameter.take(shard_of(declared, ranks.rank, ranks.size, group))
        return declared.shard is not None
    assert isinstance(declared, Table), "only matrices and tables are divided"
    if declared.is_divided:
        rows = _divided(declared.rows, ranks.rank, ranks.size, group, "the vocabulary")
        parameter.take(MatrixShard((rows,), range(declared.columns), False))
    return declared.is_divided


def shard_of(matrix: Matrix, rank: int, num_ranks: int, group: int = 1) -> MatrixShard:
    """Return the share of `rank`.

    group: columns that share a quantisation scale; boundaries along a divided dimension without heads are multiples of
    it, so that the outputs of one layer are the inputs that the next one expects.
    Raises ConfigError where heads or groups do not divide by the ranks.
    """
    whole = whole_of(matrix)
    if matrix.shard is None or num_ranks == 1:
        return whole
    if matrix.shard is Axis.OUT:
        rows = tuple(rows_of(part, rank, num_ranks, group) for part in matrix.parts)
        return MatrixShard(rows, whole.columns, matrix.bias)
    columns = _columns_of(matrix, rank, num_ranks, group)
    # The ranks' partial outputs are summed, so only one rank adds the bias.
    return MatrixShard(whole.rows, columns, matrix.bias and rank == 0)


def rows_of(part: Part, rank: int, num_ranks: int, group: int = 1) -> range:
    """Return a rank's rows of a part of a matrix that is divided along OUT. Raises ConfigError as `shard_of`."""
    if part.unit == 1:
        return _divided(part.rows, rank, num_ranks, group, part.name or "the output head")
    units = part.rows // part.unit
    if units % num_ranks == 0:
        share = part.rows // num_ranks
        return range(rank * share, (rank + 1) * share)
    if part.replicated and num_ranks % units == 0:
        unit = rank * units // num_ranks
        return range(unit * part.unit, (unit + 1) * part.unit)
    raise ConfigError(f"tensor_parallel_size={num_ranks} does not divide the {units} heads of {part.name}")


def heads_of(parameter: Parameter[Any], part: int, ranks: RankGroup) -> range:
    """Return a rank's heads of a part (by its number) of a matrix that is divided along OUT. Raises as `shard_of`."""
    declared = parameter.declared
    assert isinstance(declared, Matrix), "only matrices have heads"
    rows, unit = rows_of(declared.parts[part], ranks.rank, ranks.size), declared.parts[part].unit
    return range(rows.start // unit, rows.stop // unit)


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
