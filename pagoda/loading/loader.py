"""load_model: build a model from a checkpoint's files and fill its parameters, prepared for given kernels."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.kernels.linear.forms import ONLINE_FORMS
from pagoda.kernels.linear.packed import PackedLinears, PackedWeight, ScratchArena
from pagoda.kernels.linear.quantize import (
    CodedWeight,
    StackedWeight,
    UnstackedWeight,
    codes_of,
    quantize_to,
    stack,
)
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import PrepareOps
from pagoda.layers.module import parameters
from pagoda.layers.parameter import (
    BiasTable,
    Matrix,
    MatrixShard,
    Parameter,
    Part,
    PickedRows,
    RotaryTable,
    Table,
    Taps,
    Vector,
)
from pagoda.layers.rotary import RotaryTables
from pagoda.layers.sharding import ALONE
from pagoda.loading.gguf_file import forget_gguf, open_gguf
from pagoda.loading.model_config import build_tree, read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.packed_cache import PackedCache, packed_key
from pagoda.loading.packed_file import PackedFileWriter
from pagoda.loading.pieces import Piece, Region, bias_pieces, check_all_used, choose_naming, weight_pieces
from pagoda.loading.quantization import resolve_quantization
from pagoda.loading.rotary_tables import build_rotary_tables
from pagoda.loading.shares import shard_model
from pagoda.loading.weight_memory import PreparedAs, SharesInMemory
from pagoda.loading.weights import Weights, open_weights, reorder_rows
from pagoda.models.base import Model
from pagoda.models.naming import Naming
from pagoda.ops.tensor import ExpertWeights, LinearWeight, RankGroup, Tensor

logger = logging.getLogger("pagoda")


def load_model(
    files: ModelFiles,
    ops: PrepareOps,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    num_positions: int | None = None,
    ranks: RankGroup = ALONE,
    place: RankPlace = WHOLE,
    max_model_len: int | None = None,
    cache: PackedCache | None = None,
) -> Model:
    """Load a model's weights in `dtype` onto `device`, prepared for `ops`.

    Each matrix is packed from the mapped file; what is made int8 or fp8, or dequantised, is floats meanwhile.
    quantization: see resolve_quantization.
    num_positions: that a step can reach, None for the model's own limit.   max_model_len: the longest sequence, None
    for as many.
    ranks: those that compute the model together: only the share of `ranks.rank` is read and held.
    place: of this rank; it has the layers of its stage.
    cache: where the native kernels' weights are kept for the next start; None: they are packed in memory.
    Raises ConfigError that names what is unsupported, missing, of a wrong shape, truncated or corrupt.
    """
    quantization = resolve_quantization(files, quantization)
    architecture, config = read_architecture(files)
    model = build_tree(files, architecture, config)
    weights = open_weights(files, [layer.folder for layer in model.dense])
    naming = choose_naming(architecture, files, weights, model)
    for name in filter(weights.__contains__, architecture.zeros):
        values = torch.empty(weights.shape(name))
        weights.read_into(name, values)
        if values.any():
            raise weights.wrong(name, "is not zeros, and models of this architecture do not add it")
    if model.dense:
        # A backslash in a replacement has a meaning of its own.
        folders = tuple(
            (rf"^dense\.{index}\.", layer.folder.replace("\\", r"\\") + "/") for index, layer in enumerate(model.dense)
        )
        naming = replace(naming, substitutions=naming.substitutions + folders)
    if place.num_stages > 1:
        model.take_stage(place, ranks)
    shard_model(model, files, architecture, quantization, ranks)
    positions = num_positions or config.spec.max_position
    with _one_torch_thread():
        filler = Filler(weights, naming, ops, dtype, device, quantization, positions, max_model_len)
        packed: Mapping[str, PackedWeight] | None = None
        if cache is not None and isinstance(ops, NativeOps):
            key = packed_key(files, ops.library.path, dtype, quantization, ranks.rank, ranks.size, place)
            if key is not None:
                held = PreparedAs(str(dtype).removeprefix("torch."), quantization, True, positions)
                packed = cache.open_or_make(
                    key,
                    lambda: SharesInMemory(files, held).weights(model),
                    lambda writer: filler.write(model, ops.linears, writer),
                )
        filler.fill(model, packed or {})
    logger.info("%.1f MiB of weights read", weights.bytes_read / 2**20)
    if files.format == "gguf":
        whole = model if place.num_stages == 1 else build_tree(files, architecture, config)
        check_all_used(open_gguf(files.path).tensors, files, naming, whole)
    forget_gguf()
    return model


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Run torch on one thread while loading.

    Loading is thousands of small, memory-bound torch ops. More threads gain nothing, and on a busy machine each op's
    barrier waits for a thread that is not scheduled.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


class Filler:
    """Fills the parameters of a tree from a checkpoint, by their declarations and shards."""

    def __init__(
        self,
        weights: Weights,
        naming: Naming,
        ops: PrepareOps,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None,
        num_positions: int,
        max_model_len: int | None = None,
    ) -> None:
        self._weights, self._naming, self._ops = weights, naming, ops
        self._dtype, self._device, self._quantization = dtype, device, quantization
        self._num_positions, self._max_model_len = num_positions, max_model_len
        self._made = ONLINE_FORMS.get(quantization or "")  # of floats; else a checkpoint's own codes are kept
        self._packed: Mapping[str, LinearWeight] = {}
        self._write: Callable[[str, LinearWeight], None] | None = None

    def write(self, model: Model, linears: PackedLinears, writer: PackedFileWriter) -> None:
        """Write all that `fill` would pack, one weight in memory at a time. The tree's values are of no use then."""
        arena = ScratchArena()

        def write(name: str, weight: LinearWeight) -> None:
            assert isinstance(weight, PackedWeight)
            writer.add(name, weight)
            arena.clear()

        self._write = write
        try:
            with linears.packing_into(arena):
                self.fill(model, {})
        finally:
            self._write = None

    def fill(self, model: Model, packed: Mapping[str, LinearWeight]) -> None:
        """Fill every parameter in the order of the tree, which is the order in which a forward reads them.

        packed: linear weights as `write` has named them, which are then not read; empty to prepare them.
        """
        self._packed = packed
        paths: dict[int, str] = {}
        tied = {id(of.tied) for _, parameter in parameters(model) if isinstance(of := parameter.declared, Matrix)}
        for path, parameter in parameters(model):
            paths[id(parameter)] = path
            declared = parameter.declared
            if isinstance(declared, Table) and id(parameter) in tied and self._ops.packs_weights:
                pass  # it is filled with the head
            elif isinstance(declared, Matrix) and declared.tied is not None:
                parameter.fill(self._tied(path, paths[id(declared.tied)], declared, parameter.shard, declared.tied))
            else:
                parameter.fill(self._value(path, parameter))

    def _weight(self, name: str, prepare: Callable[[], LinearWeight]) -> LinearWeight:
        """Return a linear weight from what is packed already, or prepare it.   name: no other weight's."""
        weight = self._packed.get(name)
        if weight is None:
            weight = prepare()
        if self._write is not None:
            self._write(name, weight)
        return weight

    def _value(self, path: str, parameter: Parameter[object]) -> object:
        declared = parameter.declared
        match declared:
            case Table():
                return self._coded_table(path, declared, parameter.shard) or self._table(
                    path, declared, parameter.shard
                )
            case Vector():
                return self._vector(path, declared)
            case Taps(channels, taps, factors):
                stored = self._tensor(path, (channels, 1, taps), torch.float32)
                if factors:
                    counts = torch.tensor([count for count, _ in factors])
                    stored *= torch.tensor([factor for _, factor in factors]).repeat_interleave(counts).view(-1, 1, 1)
                return stored.squeeze(1).T.to(self._dtype).contiguous()
            case RotaryTable():
                return self._rotary_tables(declared)
            case BiasTable(num_heads, num_buckets, buckets):
                stored = self._tensor(path, (num_buckets, num_heads), torch.float32)
                return stored[torch.from_numpy(buckets)].T.contiguous()
            case Matrix(num_experts=0):
                return self._matrix(path, declared, parameter.shard)
            case Matrix():
                return self._experts(path, declared, parameter.shard)

    def _tensor(self, path: str, shape: tuple[int, ...], dtype: torch.dtype, *others: tuple[int, ...]) -> torch.Tensor:
        """Return a stored tensor.   others: further shapes that it may have; dimensions of one may be left out."""
        name = self._naming.find(path).name
        stored = self._weights.shape(name)
        if _without_ones(stored) not in map(_without_ones, (shape, *others)):
            self._check_shape(name, shape)
        out = torch.empty(stored, dtype=dtype, device=self._device)
        self._weights.read_into(name, out)
        return out.view(shape)

    def _table(self, path: str, declared: Table, shard: MatrixShard) -> torch.Tensor:
        name, skipped = self._naming.find(path).name, declared.skipped
        self._check_shape(name, (skipped + declared.rows, declared.columns))
        (rows,) = shard.rows
        if declared.by_position:
            rows = rows[: self._num_positions]
            table = torch.zeros(self._num_positions, declared.columns, dtype=self._dtype, device=self._device)
            out = table[: len(rows)]
        else:
            table = out = torch.empty(shard.shape, dtype=self._dtype, device=self._device)
        region = Region(None, range(skipped + rows.start, skipped + rows.stop), shard.columns)
        self._weights.read_into(name, out, region if skipped or len(rows) < declared.rows else None)
        return table

    def _coded_table(self, path: str, declared: Table, shard: MatrixShard) -> Tensor | None:
        """Return a table whose rows are read from its stored codes; None if it is held as floats."""
        name, skipped = self._naming.find(path).name, declared.skipped
        if self._quantization is None or self._made is not None or not self._ops.packs_weights or declared.by_position:
            return None
        self._check_shape(name, (skipped + declared.rows, declared.columns))
        (rows,) = shard.rows
        region = Region(None, range(skipped + rows.start, skipped + rows.stop), range(declared.columns))
        codes = self._weights.read_codes(name, region)
        if codes is None:
            return None
        return self._ops.table_of(self._weight(path, lambda: self._ops.prepare_quantized_linear(codes, self._dtype)))

    def _vector(self, path: str, declared: Vector) -> torch.Tensor | float:
        """Return the vector in compute dtype, without the 1 of a unit offset; a number rounded to it."""
        dtype = torch.float32 if declared.is_float32 else self._dtype
        if declared.zeros:
            return torch.zeros(declared.size, dtype=dtype, device=self._device)
        by_unit = (declared.size // declared.unit, declared.unit)
        out = self._tensor(path, (declared.size,), torch.float32, by_unit)
        if declared.unit_offset and self._naming.folded:
            out -= 1.0  # in float32: 1 + weight has lost nothing yet
        if declared.negative_exp and not self._naming.folded:
            out = -torch.exp(out)
        order = None if declared.rotary is None else declared.rotary.head_order(declared.unit)
        if order is not None:
            out = out.view(-1, declared.unit)[:, list(order)].flatten()
        return float(out.to(dtype)) if declared.is_number else out.to(dtype)

    def _rotary_tables(self, declared: RotaryTable) -> RotaryTables:
        name, factors = self._naming.rope_factors, None
        if declared.scaled_by_checkpoint and name is not None and name in self._weights:
            shape = (declared.rope.num_rotated(declared.head_dim) // 2,)
            self._check_shape(name, shape)
            factors = torch.empty(shape, dtype=torch.float32)
            self._weights.read_into(name, factors)
        positions = declared.num_positions or self._num_positions
        return build_rotary_tables(
            declared.rope, declared.head_dim, positions, self._device, factors, self._max_model_len
        )

    def _matrix(self, path: str, matrix: Matrix, shard: MatrixShard) -> LinearWeight:
        picked = matrix.picked
        if picked is not None:
            return self._weight(path, lambda: self._picked(matrix, picked))
        return self._weight(path, lambda: self._prepared(path, matrix, shard, 0))

    def _experts(self, path: str, matrix: Matrix, shard: MatrixShard) -> ExpertWeights:
        """Prepare the experts in one form: if a part of one is stored as floats, or in an order of activations, all are
        read as floats.
        """
        experts = range(matrix.num_experts)
        stored = (
            piece.name for expert in experts for piece in weight_pieces(self._naming, path, matrix, shard, expert)
        )
        keep_codes = all(self._weights.has_codes(name) for name in stored)
        return self._ops.prepare_experts(
            [
                self._weight(f"{path}.{expert}", partial(self._prepared, path, matrix, shard, expert, keep_codes))
                for expert in experts
            ]
        )

    def _tied(
        self, path: str, table_path: str, matrix: Matrix, shard: MatrixShard, table: Parameter[Tensor]
    ) -> LinearWeight:
        """Prepare the weight from the table in memory, or from where it is stored.

        If the prepared weight holds the table's values, the table is then read from it, and held once.
        """

        def prepare() -> LinearWeight:
            pieces = list(weight_pieces(self._naming, table_path, matrix, shard))
            codes = self._codes(pieces)
            if codes is not None:
                return self._ops.prepare_quantized_linear(codes, self._dtype)
            if self._ops.packs_weights:
                return self._prepare(matrix, self._parts(pieces), None)
            assert isinstance(table.value, torch.Tensor)
            return self._prepare(matrix, [table.value], None)

        weight = self._weight(path, prepare)
        shared = None if self._made is not None and matrix.quantizable else self._ops.table_of(weight)
        if shared is not None:
            table.fill(shared)
        elif self._ops.packs_weights:
            table.fill(cast(Tensor, self._value(table_path, cast(Parameter[object], table))))
        return weight

    def _picked(self, matrix: Matrix, picked: PickedRows) -> LinearWeight:
        name, columns = self._naming.find(picked.path).name, matrix.columns
        self._check_shape(name, (picked.num_rows, columns))

        def rows(numbers: Sequence[int]) -> torch.Tensor:
            found = torch.empty((len(numbers), columns), dtype=torch.float32, device=self._device)
            for out, number in zip(found.split(1), numbers, strict=True):
                if number >= picked.num_rows:
                    raise self._weights.wrong(name, f"has {picked.num_rows} rows, none for token {number}")
                self._weights.read_into(name, out, Region(None, range(number, number + 1), range(columns)))
            return found

        weight = rows(picked.plus)
        if picked.minus:
            weight -= rows(picked.minus)
        return self._ops.prepare_linear(weight.to(self._dtype), None)

    def _prepared(
        self, path: str, matrix: Matrix, shard: MatrixShard, expert: int, keep_codes: bool = True
    ) -> LinearWeight:
        bias = None
        if shard.bias:
            bias = self._stacked(list(bias_pieces(self._naming, path, matrix, shard, expert)))
        pieces = list(weight_pieces(self._naming, path, matrix, shard, expert))
        codes = self._codes(pieces) if matrix.quantizable and keep_codes else None
        if codes is not None:
            if matrix.num_experts and isinstance(codes, StackedWeight):
                codes = codes_of(codes)  # the experts of a layer are in one form
            return self._ops.prepare_quantized_linear(codes, self._dtype, bias, matrix.in_pairs)
        return self._prepare(matrix, self._parts(pieces), bias)

    def _prepare(self, matrix: Matrix, parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearWeight:
        if self._made is not None and matrix.quantizable:
            weight = parts[0] if len(parts) == 1 else torch.cat([*parts])
            made = quantize_to(self._made, weight)
            return self._ops.prepare_quantized_linear(made, self._dtype, bias, matrix.in_pairs)
        return self._ops.prepare_stacked(parts, bias, matrix.in_pairs)

    def _parts(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the pieces in the compute dtype: views of the mapped file where that is enough, else stacked."""
        views: list[torch.Tensor] = []
        for piece in pieces:
            self._check_shape(piece.name, piece.shape)
            is_enough = self._ops.packs_weights and self._head_order(piece.part) is None
            view = self._weights.view(piece.name, piece.region, self._dtype) if is_enough else None
            if view is None:
                return [self._stacked(pieces)]
            views.append(view)
        return views

    def _stacked(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the pieces stacked row-wise, in the compute dtype."""
        for piece in pieces:
            if piece.is_stored:
                self._check_shape(piece.name, piece.shape)
        sizes = [len(piece.region.rows) for piece in pieces]
        out = torch.empty((sum(sizes), *pieces[0].region.shape[1:]), dtype=self._dtype, device=self._device)
        for piece, rows in zip(pieces, out.split(sizes), strict=True):
            if not piece.is_stored:
                rows.zero_()
                continue
            self._weights.read_into(piece.name, rows, piece.region)
            reorder_rows(rows, self._head_order(piece.part))
        return out

    def _codes(self, pieces: Sequence[Piece]) -> CodedWeight | None:
        """Return the pieces stacked as their stored codes; None if floats are stored or codes are not wanted."""
        if self._quantization is None or self._made is not None:
            return None
        codes: list[UnstackedWeight] = []
        for piece in pieces:
            self._check_shape(piece.name, piece.shape)
            found = self._weights.read_codes(piece.name, piece.region, self._head_order(piece.part))
            if found is None:
                return None
            codes.append(found)
        return stack(codes, self._device)

    def _head_order(self, part: Part) -> tuple[int, ...] | None:
        """Return the order in which the rows of the part's heads are read, None for that in which they are stored."""
        return part.unit_order(self._naming.interleaved_rotary)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError for an unexpected shape, before anything of that size is allocated.

        A matrix of one row may be stored as a vector.
        """
        found = self._weights.shape(name)
        if found != shape and (1, *found) != shape:
            raise self._weights.wrong(name, f"has the shape {found}, the model's settings ask for {shape}")
