"""Estimate the memory of a model's weights from declarations and headers. No torch: `pagoda plan` uses it."""

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.kernels.linear.packed_bytes import Form, packed_bias_bytes, packed_bytes, tiled_bytes
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Declaration, Matrix, RotaryTable, Table, Vector
from pagoda.layers.sharding import shard_of
from pagoda.loading.choose_naming import choose_naming
from pagoda.loading.code_forms import INT8_GROUP, stacked_form
from pagoda.loading.gguf_file import GGUFFile
from pagoda.loading.model_config import build_tree, read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.packed_format import packed_format, packed_stem
from pagoda.loading.pieces import weight_pieces
from pagoda.loading.quantization import resolve_quantization
from pagoda.loading.safetensors_header import read_headers
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.naming import Naming


@dataclass(frozen=True, slots=True)
class PreparedAs:
    """How weights are held.

    dtype: the compute dtype, "float32", "bfloat16" or "float16".   quantization: the setting.
    packed: in the native kernels' panels.   tiled: for Triton's kernels, quantised weights as codes. Else as dense
    matrices of the compute dtype.   num_positions: of the rotary tables.
    """

    dtype: str
    quantization: str | None
    packed: bool
    num_positions: int
    tiled: bool = False


def weight_memory(files: ModelFiles, prepared: PreparedAs) -> int:
    """Return the bytes of all parameters once loaded: exact for packed weights, except for the padding between them.

    A tied embedding and output head share one copy, except where the head is quantised, or is packed by torch in
    bfloat16: then the embedding's rows are held in the compute dtype as well.
    """
    architecture, config = read_architecture(files)
    model = build_tree(files, architecture, config)
    form_of = _forms(files, architecture, model, prepared)
    paths: dict[int, str] = {}
    total = 0
    for path, parameter in parameters(model):
        paths[id(parameter)] = path
        declared = parameter.declared
        if isinstance(declared, Matrix) and declared.tied is not None:
            path = paths[id(declared.tied)]
            if _shares_table(form_of(path, declared)[0], prepared):
                total -= _bytes(path, declared.tied.declared, prepared, form_of)
        total += _bytes(path, declared, prepared, form_of)
    return total


def _shares_table(form: Form, prepared: PreparedAs) -> bool:
    """Whether a tied embedding reads its rows from the head, held in `form`: see PrepareOps.table_of."""
    holds_floats = form.value == prepared.dtype
    packed_by_torch = not (prepared.packed or prepared.tiled) and prepared.dtype == "bfloat16"
    return holds_floats and not packed_by_torch


_FormOf = Callable[[str, Matrix], tuple[Form, int]]


def _bytes(path: str, declared: Declaration, prepared: PreparedAs, form_of: _FormOf) -> int:
    """Return the bytes of one parameter.   path: of the stored values (for a tied head, the table's)."""
    element = DTYPE_BYTES[prepared.dtype]
    match declared:
        case Table(rows, columns):
            return rows * columns * element
        case Vector(size):
            return size * element
        case RotaryTable(_, head_dim):
            return 2 * prepared.num_positions * (head_dim // 2) * 4
        case Matrix() as matrix:
            count = max(1, matrix.num_experts)
            form, group = form_of(path, matrix)
            if prepared.packed:
                bias = packed_bias_bytes(matrix.rows) if matrix.bias else 0
                return count * (packed_bytes(form, matrix.rows, matrix.columns, group) + bias)
            if not prepared.tiled:
                form = Form(prepared.dtype)
            bias = matrix.rows * element if matrix.bias else 0
            return count * (tiled_bytes(form, matrix.rows, matrix.columns, group) + bias)


def _forms(files: ModelFiles, architecture: Architecture, model: Model, prepared: PreparedAs) -> _FormOf:
    """Return a function that gives the form of a matrix, and its group if quantised."""
    floats = (Form(prepared.dtype), 0)
    quantization = resolve_quantization(files, prepared.quantization)
    match quantization:
        case None:
            stored = None
        case "int8":
            return lambda _, matrix: (Form.Q8, INT8_GROUP) if matrix.quantizable else floats
        case "fp8":
            return lambda _, matrix: (Form.FP8, 0) if matrix.quantizable else floats
        case "gguf":
            stored = _gguf_form(files, architecture.gguf)
        case _:
            stored = _packed_form(files, architecture, model)

    def form_of(path: str, matrix: Matrix) -> tuple[Form, int]:
        return floats if stored is None or not matrix.quantizable else stored(path, matrix) or floats

    return form_of


_StoredForm = Callable[[str, Matrix], tuple[Form, int] | None]


def _gguf_form(files: ModelFiles, naming: Naming) -> _StoredForm:
    tensors = GGUFFile(files.path).tensors

    def form_of(path: str, matrix: Matrix) -> tuple[Form, int] | None:
        pieces = weight_pieces(naming, path, matrix, shard_of(matrix, 0, 1))
        kinds = [tensors[piece.name].type for piece in pieces if piece.name in tensors]
        codes = stacked_form(kinds) if kinds else None
        if codes is None:
            return None
        if codes.bits == 4:
            return (Form.Q4_MIN if codes.has_minima else Form.Q4), codes.group
        return (Form.Q8 if codes.bits == 8 else Form.Q6), codes.group

    return form_of


def _packed_form(files: ModelFiles, architecture: Architecture, model: Model) -> _StoredForm:
    """Of AWQ and GPTQ: codes where all parts of a matrix, and of all experts of a layer, are stored as codes."""
    names, stored = read_headers(files.path), packed_format(files)
    assert stored is not None
    naming = choose_naming(architecture, files, names, model)
    form = Form.Q4 if stored.symmetric else Form.Q4_ZERO, stored.kernel_group

    def form_of(path: str, matrix: Matrix) -> tuple[Form, int] | None:
        shard, experts = shard_of(matrix, 0, 1), range(max(1, matrix.num_experts))
        pieces = (piece for expert in experts for piece in weight_pieces(naming, path, matrix, shard, expert))
        return form if all(packed_stem(piece.name, names) for piece in pieces) else None

    return form_of
