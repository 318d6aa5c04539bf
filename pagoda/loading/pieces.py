"""Where a matrix is in a checkpoint: the names of its tensors, and the rectangles of them that make up the matrix, or a
rank's share of it. No torch.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from pagoda.base.errors import ConfigError
from pagoda.layers.module import parameters
from pagoda.layers.parameter import (
    BiasTable,
    Declaration,
    Matrix,
    MatrixShard,
    Part,
    StoredBlock,
    Table,
    Taps,
    Vector,
    whole_of,
)
from pagoda.loading.model_files import ModelFiles
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.naming import Naming


def choose_naming(architecture: Architecture, files: ModelFiles, names: Container[str], model: Model) -> Naming:
    """Return the first naming whose tables, vectors and experts all exist, else the first whose embedding exists.

    names: of the checkpoint's tensors. Raises ConfigError if none fits.
    """
    if files.format == "gguf":
        return architecture.gguf
    paths = [path for path, parameter in parameters(model) if _is_named(parameter.declared)]
    experts = [
        f"{part_path}.weight"
        for path, parameter in parameters(model)
        if isinstance(matrix := parameter.declared, Matrix) and matrix.num_experts
        for part_path in matrix.part_paths(path)
    ]
    for naming in architecture.hf:
        if all(naming.find(path).name in names for path in (*paths, *experts)):
            return naming
    embeddings = [naming.find(paths[0]).name for naming in architecture.hf]
    for naming, embedding in zip(architecture.hf, embeddings, strict=True):
        if embedding in names:
            return naming
    raise ConfigError(
        f"{files.path}: no {architecture.name} weights: none of these tensors exists: {', '.join(embeddings)}"
    )


_UNREAD = r"\.(rope_freqs|attn_rot_embd)\."
"""What GGUF files have that follows from their settings."""


def check_all_used(stored: Iterable[str], files: ModelFiles, naming: Naming, model: Model) -> None:
    """Raise ConfigError for weights of a GGUF's layers that the model does not read: it would compute something else.

    A config.json says by its settings what such files only say by their tensors. stored: their names.
    """
    used, names = {name for name, _ in stored_tensors(naming, model)}, list(stored)
    layers = re.compile(r"(blk\.\d+)\..*\.(weight|bias)")
    drafters = {name.partition(".nextn.")[0] for name in names if ".nextn." in name}  # layers of draft heads
    unread = [
        name
        for name in names
        if name not in used
        and (layer := layers.fullmatch(name)) is not None
        and layer[1] not in drafters
        and not re.search(_UNREAD, name)
    ]
    if unread:
        raise ConfigError(
            f"{files.path}: {len(unread)} tensors of its layers, such as {unread[0]!r}, are not part of a "
            f"{model.spec.architecture} as it is supported here"
        )


def stored_tensors(naming: Naming, model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that loading a model would read; a name once per piece."""
    for path, parameter in parameters(model):
        match parameter.declared:
            case Table(rows=rows, columns=columns, skipped=skipped):
                yield naming.find(path).name, (skipped + rows, columns)
            case BiasTable(num_heads=num_heads, num_buckets=num_buckets):
                yield naming.find(path).name, (num_buckets, num_heads)
            case Vector(size=size, zeros=False):
                stored = naming.find(path)
                yield stored.name, stored.shape_of_vector(size)
            case Taps(channels, taps):
                yield naming.find(path).name, (channels, 1, taps)
            case Matrix(tied=None, picked=None) as matrix:
                shard = whole_of(matrix)
                for expert in range(max(1, matrix.num_experts)):
                    pieces = [*weight_pieces(naming, path, matrix, shard, expert)]
                    pieces += bias_pieces(naming, path, matrix, shard, expert) if matrix.bias else ()
                    yield from ((piece.name, piece.shape) for piece in pieces if piece.is_stored)
            case _:
                pass


def _is_named(declared: Declaration) -> bool:
    """Whether the checkpoint has one tensor for the parameter, named as its path."""
    return isinstance(declared, Table | Taps) or (isinstance(declared, Vector) and not declared.zeros)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a stored tensor.

    index: which of the stacked matrices, None if they are not stacked.   rows, columns: of that matrix; a vector has
    rows and no columns.   transposed: the tensor is stored [columns, rows].   taps: see Matrix.
    """

    index: int | None
    rows: range
    columns: range | None
    transposed: bool = False
    taps: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows),) if self.columns is None else (len(self.rows), len(self.columns))


@dataclass(frozen=True, slots=True)
class Piece:
    """The stored form of one part of a matrix or of its bias.

    shape: expected of the stored tensor.   region: the part of it to read.   is_stored: False: it is zeros.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    part: Part
    is_stored: bool = True


def weight_pieces(naming: Naming, path: str, matrix: Matrix, shard: MatrixShard, expert: int = 0) -> Iterator[Piece]:
    """Yield the weight's pieces in the order of rows."""
    return _pieces(naming, path, matrix, shard, "weight", expert)


def bias_pieces(naming: Naming, path: str, matrix: Matrix, shard: MatrixShard, expert: int = 0) -> Iterator[Piece]:
    """Yield the bias's pieces in the order of rows."""
    return _pieces(naming, path, matrix, shard, "bias", expert)


def _pieces(naming: Naming, path: str, matrix: Matrix, shard: MatrixShard, suffix: str, expert: int) -> Iterator[Piece]:
    found = [naming.find(f"{part_path}.{suffix}") for part_path in matrix.part_paths(path, expert)]
    # Parts of one name, or whose names become one, are rows of one tensor.
    matrix = replace(
        matrix, parts=tuple(replace(part, name=stored.name) for part, stored in zip(matrix.parts, found, strict=True))
    )
    stored_rows: Counter[str] = Counter()
    for part in matrix.parts:
        stored_rows[part.name] += part.rows
    for number, (stored, part, rows) in enumerate(zip(found, matrix.parts, shard.rows, strict=True)):
        if part.block is not None:
            yield from _blocks(stored.name, part, part.block, rows, shard.columns)
            continue
        num_rows = stored_rows[stored.name]
        shape = (num_rows,) if suffix == "bias" else (num_rows, *(matrix.kernel or (matrix.columns,)))
        transposed = suffix == "weight" and naming.is_transposed(stored.name)
        if transposed:
            shape = shape[::-1]
        if stored.index is not None:
            shape = (matrix.num_experts, *shape)
        columns = None if suffix == "bias" else shard.columns
        units = matrix.stored_units(number, not naming.by_part)
        if units.step == part.unit:
            runs = [range(units.start + rows.start, units.start + rows.stop)]
        elif part.unit == 1:
            runs = [units[rows.start : rows.stop]]
        else:
            runs = [range(at, at + part.unit) for at in units[rows.start // part.unit : rows.stop // part.unit]]
        for run in runs:
            region = Region(stored.index, run, columns, transposed, matrix.taps)
            yield Piece(stored.name, shape, region, part, suffix == "weight" or part.has_bias)


def _blocks(name: str, part: Part, block: StoredBlock, rows: range, columns: range) -> Iterator[Piece]:
    """Yield the units of a part whose stored rows are not its own.   rows: whole units.   columns: of a unit."""
    width = part.unit if block.is_transposed else len(columns)
    shape = (part.rows // part.unit * block.step, width)
    for unit in range(rows.start // part.unit, rows.stop // part.unit):
        first = unit * block.step + block.first
        region = Region(None, range(first, first + part.unit), columns)
        if block.is_transposed:
            region = Region(None, range(part.unit), range(first, first + len(columns)), transposed=True)
        yield Piece(name, shape, region, part)
