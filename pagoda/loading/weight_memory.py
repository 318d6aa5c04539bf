"""Estimate the memory of weights and adapters from declarations and headers. No torch: `pagoda plan` uses it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.kernels.linear.forms import (
    FLOATS,
    GGUF_TYPES,
    NOT_FOR_TRITON,
    ONLINE_FORMS,
    Q8,
    WeightFormat,
    packed_bias_bytes,
)
from pagoda.layers.lora_targets import lora_targets
from pagoda.layers.module import parameters
from pagoda.layers.parameter import BiasTable, Matrix, Parameter, RotaryTable, Table, Taps, Vector, whole_of
from pagoda.layers.sharding import RankNumber
from pagoda.loading.gguf_file import open_gguf
from pagoda.loading.model_config import build_tree, read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.pieces import choose_naming, weight_pieces
from pagoda.loading.quantization import PackedFormat, packed_format, resolve_quantization
from pagoda.loading.safetensors_header import read_headers
from pagoda.loading.shares import column_group, shard_model
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model


@dataclass(frozen=True, slots=True)
class PreparedAs:
    """How weights are held.

    dtype: the compute dtype, "float32", "bfloat16" or "float16".   quantization: the setting.
    packed: in the native kernels' panels.   for_triton: for Triton's kernels, quantised weights as codes. Else as dense
    matrices of the compute dtype.   num_positions: of the rotary tables.
    """

    dtype: str
    quantization: str | None
    packed: bool
    num_positions: int
    for_triton: bool = False


def weight_memory(files: ModelFiles, prepared: PreparedAs, places: Sequence[RankPlace] = (WHOLE,)) -> int:
    """Return the bytes of all parameters of the rank that has most, once loaded: see `SharesInMemory`.

    places: of the ranks.
    """
    shares = SharesInMemory(files, prepared)
    return max(shares.weights(shares.tree(place)) for place in places)


class SharesInMemory:
    """What ranks hold of a model whose files are read once."""

    def __init__(self, files: ModelFiles, prepared: PreparedAs) -> None:
        self._files, self._prepared = files, prepared
        self._architecture, self._config = read_architecture(files)
        self._whole = build_tree(files, self._architecture, self._config)
        self._held_as = _forms(files, self._architecture, self._whole, prepared)
        stored = packed_format(files)
        self._ordered = stored if stored is not None and stored.ordered else None
        self._is_made = resolve_quantization(files, prepared.quantization) in ONLINE_FORMS
        self._group: int | None = None

    def tree(self, place: RankPlace) -> Model:
        """Return the tree of a rank's share. Raises ConfigError if the model cannot be divided so."""
        architecture, quantization = self._architecture, self._prepared.quantization
        model = build_tree(self._files, architecture, self._config)
        ranks = RankNumber(place.tensor_rank, place.tensor_size)
        if place.num_stages > 1:
            model.take_stage(place, ranks)
        if place.tensor_size > 1 and self._group is None:
            self._group = column_group(self._whole, self._files, architecture, quantization)
        shard_model(model, self._files, architecture, quantization, ranks, self._group)
        return model

    def weights(self, model: Model) -> int:
        """Return the bytes of a tree's parameters: exact for packed weights, except for the padding between them.

        Of a weight whose groups are in the order of activations it is the most that its shares along columns take, and
        that it takes for Triton's kernels.
        Of an outline of codes it is the tree's share of what all codes take.

        A tied embedding and output head share one copy, except where the head is made int8 or fp8 while loading, or is
        packed by torch in bfloat16: then the embedding's rows are held in the compute dtype as well.
        """
        total, codes = self._bytes_of(model), self._files.codes_bytes
        return total * codes // self._bytes_of(self._whole) if codes else total

    def _bytes_of(self, model: Model) -> int:
        paths: dict[int, str] = {}
        total = 0
        for path, parameter in parameters(model):
            paths[id(parameter)] = path
            declared = parameter.declared
            if isinstance(declared, Matrix) and declared.tied is not None:
                path = paths[id(declared.tied)]
                if _shares_table(self._held_as(path, declared), self._is_made and declared.quantizable, self._prepared):
                    total -= _bytes(path, declared.tied, self._prepared, self._held_as)
            total += _bytes(path, parameter, self._prepared, self._held_as, self._ordered)
        return total


def _shares_table(held: Sequence[WeightFormat], made: bool, prepared: PreparedAs) -> bool:
    """Whether a tied embedding reads its rows from the head: see PrepareOps.table_of.   made: codes, while loading."""
    if prepared.packed:
        return not made
    holds_floats = [*held] == [WeightFormat(FLOATS[prepared.dtype])]
    return holds_floats and (prepared.for_triton or prepared.dtype != "bfloat16")  # which torch packs


_HeldAs = Callable[[str, Matrix | Table], Sequence[WeightFormat]]
"""From a matrix or table and the path of its stored values to how its parts are held; one, if all are held alike."""


def _bytes(
    path: str,
    parameter: Parameter[Any],
    prepared: PreparedAs,
    held_as: _HeldAs,
    ordered: PackedFormat | None = None,
) -> int:
    """Return the bytes of one parameter.

    path: of the stored values (for a tied head, the table's).   ordered: the format of a checkpoint whose groups are in
    the order of activations.
    """
    element = DTYPE_BYTES[prepared.dtype]
    match parameter.declared:
        case Table(columns=columns, by_position=True):
            return prepared.num_positions * columns * element
        case Table() as table:
            rows, columns = parameter.shard.shape
            [held] = held_as(path, table)
            coded = prepared.packed and held.form is not FLOATS[prepared.dtype]
            return held.packed_bytes(rows, columns) if coded else rows * columns * element
        case Vector(is_number=True):
            return 0
        case Vector(size, is_float32=is_float32):
            return size * (4 if is_float32 else element)
        case Taps(channels, taps):
            return channels * taps * element
        case BiasTable(num_heads=num_heads, buckets=buckets):
            return num_heads * len(buckets) * 4
        case RotaryTable(rope, head_dim, _, num_positions):
            return (num_positions or prepared.num_positions) * (2 * (head_dim // 2) + (rope.query_beta > 0)) * 4
        case Matrix() as matrix:
            count = max(1, matrix.num_experts)
            held = held_as(path, matrix)
            (rows, columns), has_bias = parameter.shard.shape, parameter.shard.bias
            ordered = ordered if ordered is not None and [*held] == [ordered.held_as] else None
            if prepared.packed:
                if ordered is not None and ordered.group and columns < matrix.columns:
                    # A share has some of each group, padded.
                    groups = -(-matrix.columns // ordered.group)
                    columns += min(groups, columns) * (ordered.held_as.group - 1)
                parts = [(held[0], rows)]
                if len(held) > 1 and matrix.num_experts:  # of which all are in one form
                    parts = [(WeightFormat(Q8, 32), rows)]
                elif len(held) > 1:
                    parts = _runs(held, [len(of_part) for of_part in parameter.shard.rows])
                bias = sum(packed_bias_bytes(run) for _, run in parts) if has_bias else 0
                return count * (sum(of_run.packed_bytes(run, columns) for of_run, run in parts) + bias)
            as_one = held[0] if len(held) == 1 else WeightFormat(Q8, 32)
            if not prepared.for_triton or ordered is not None or as_one.form in NOT_FOR_TRITON:
                as_one = WeightFormat(FLOATS[prepared.dtype])
            bias = rows * element if has_bias else 0
            return count * (as_one.triton_bytes(rows, columns) + bias)


def _runs(held: Sequence[WeightFormat], rows: Sequence[int]) -> list[tuple[WeightFormat, int]]:
    """Return how neighbouring parts are held that are held alike, and their rows.   rows: of each part."""
    parts = groupby(zip(held, rows, strict=True), key=itemgetter(0))
    return [(of_run, sum(count for _, count in run)) for of_run, run in parts]


def _forms(files: ModelFiles, architecture: Architecture, model: Model, prepared: PreparedAs) -> _HeldAs:
    """Return a function that says how a matrix is held."""
    quantization = resolve_quantization(files, prepared.quantization)
    made, stored = ONLINE_FORMS.get(quantization or ""), None
    if made is None and quantization is not None:
        by_format = _gguf_form if quantization == "gguf" else _packed_form
        stored = by_format(files, architecture, model)

    def held_as(path: str, declared: Matrix | Table) -> Sequence[WeightFormat]:
        held: Sequence[WeightFormat] | None = None
        if isinstance(declared, Table) or declared.quantizable:
            if stored is not None:
                held = stored(path, declared)
            elif made is not None and isinstance(declared, Matrix):
                held = [made]
        return held or [WeightFormat(FLOATS[prepared.dtype])]

    return held_as


_StoredAs = Callable[[str, Matrix | Table], Sequence[WeightFormat] | None]


def _gguf_form(files: ModelFiles, architecture: Architecture, model: Model) -> _StoredAs:
    """Floats where any part of a matrix has floats."""
    tensors = open_gguf(files.path).tensors

    def held_as(path: str, declared: Matrix | Table) -> Sequence[WeightFormat] | None:
        if isinstance(declared, Table):
            names = [architecture.gguf.find(path).name]
        else:
            names = [architecture.gguf.find(f"{of_part}.weight").name for of_part in declared.part_paths(path)]
        found = [GGUF_TYPES.get(tensors[name].type.name) for name in names if name in tensors]
        held = [of_part for of_part in found if of_part is not None]
        if not held or len(held) < len(found):
            return None
        return held[:1] if len(set(held)) == 1 else held

    return held_as


def _packed_form(files: ModelFiles, architecture: Architecture, model: Model) -> _StoredAs:
    """Of other quantised checkpoints: codes where all parts of a matrix, and of all experts of a layer, are."""
    names, stored = read_headers(files.path), packed_format(files)
    assert stored is not None
    naming = choose_naming(architecture, files, names, model)

    def held_as(path: str, matrix: Matrix | Table) -> Sequence[WeightFormat] | None:
        if isinstance(matrix, Table) or (matrix.num_experts and stored.ordered):
            return None
        shard, experts = whole_of(matrix), range(max(1, matrix.num_experts))
        pieces = (piece for expert in experts for piece in weight_pieces(naming, path, matrix, shard, expert))
        return [stored.held_as] if all(stored.stem(piece.name, names) for piece in pieces) else None

    return held_as


def adapter_memory(model: Model, max_rank: int, dtype: str, packed: bool) -> int:
    """Return the bytes of an adapter of rank `max_rank` that adapts all that can be adapted.

    dtype: the compute dtype.   packed: in the native kernels' panels; else as dense matrices.
    """
    held, element = WeightFormat(FLOATS[dtype]), DTYPE_BYTES[dtype]
    stacked_ranks: dict[int, int] = {}  # of the parts of a fused weight, whose `a` are one weight
    inputs: dict[int, int] = {}
    total = 0
    for target in lora_targets(model).values():
        share = target.share()
        if share is None:
            continue
        rows = share.num_rows
        total += held.packed_bytes(rows, max_rank) if packed else rows * max_rank * element
        key = id(target.parameter)
        stacked_ranks[key] = stacked_ranks.get(key, 0) + max_rank + (max_rank % 2 if packed else 0)
        inputs[key] = len(share.columns)
    for key, rank in stacked_ranks.items():
        total += held.packed_bytes(rank, inputs[key]) if packed else rank * inputs[key] * element
    return total
