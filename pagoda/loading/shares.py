"""Make a model's tree the share of one rank: where its matrices may be divided, and which sizes divide it. No torch."""

from math import lcm

from pagoda.base.errors import ConfigError
from pagoda.base.ranks import RankPlace
from pagoda.kernels.linear.forms import ONLINE_FORMS
from pagoda.layers.kv import with_shapes_of
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Axis, Matrix
from pagoda.layers.sharding import RankNumber, divide
from pagoda.loading.gguf_file import block_of, open_gguf
from pagoda.loading.model_config import build_tree, read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.pieces import weight_pieces
from pagoda.loading.quantization import packed_format, resolve_quantization
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.ops.tensor import RankGroup

_GROUP_OF_INPUTS = 32  # in which native kernels quantise the inputs of 4-bit weights; whole words of any
_LARGEST_SIZE = 64  # that an error suggests


def shard_model(
    model: Model,
    files: ModelFiles,
    architecture: Architecture,
    quantization: str | None,
    ranks: RankGroup,
    group: int | None = None,
) -> None:
    """Make a tree, whose weights are not loaded, the share of one rank.

    quantization: the setting.   ranks: if it is one, nothing is divided.   group: the `column_group`, if it is known.
    Raises ConfigError for a number of ranks that does not divide heads or quantisation groups, with those that do.
    """
    if ranks.size == 1:
        return
    group = group or column_group(model, files, architecture, quantization)
    try:
        divide(model, ranks, group)
    except ConfigError as error:
        fitting = ", ".join(str(size) for size in range(1, _LARGEST_SIZE + 1) if _divides(model, size, group))
        raise ConfigError(f"{files.name!r} cannot be divided: {error}; sizes that divide it: {fitting}") from None
    model.kv_groups = with_shapes_of(model, model.kv_groups)


def read_share(files: ModelFiles, quantization: str | None, place: RankPlace) -> Model:
    """Return the tree of a rank's share of a model, without its weights.

    Raises ConfigError as `shard_model`, and for more stages than the model can be divided into.
    """
    architecture, config = read_architecture(files)
    model = build_tree(files, architecture, config)
    ranks = RankNumber(place.tensor_rank, place.tensor_size)
    if place.num_stages > 1:
        model.take_stage(place, ranks)
    shard_model(model, files, architecture, quantization, ranks)
    return model


def _divides(model: Model, size: int, group: int) -> bool:
    try:
        divide(model, RankNumber(0, size), group)
    except ConfigError:
        return False
    return True


def column_group(model: Model, files: ModelFiles, architecture: Architecture, quantization: str | None) -> int:
    """Return of how many columns the boundaries between ranks must be multiples, in matrices divided along columns."""
    made = ONLINE_FORMS.get(resolve_quantization(files, quantization) or "")
    stored = 1
    if files.format == "gguf":
        stored = _largest_block(model, files, architecture)
    elif (packed := packed_format(files)) is not None:
        stored = packed.group if packed.group and not packed.ordered else _GROUP_OF_INPUTS
    return lcm(stored, made.group if made is not None and made.group else 1)


def _largest_block(model: Model, files: ModelFiles, architecture: Architecture) -> int:
    """Return the most elements stored together in matrices divided along columns; all smaller blocks divide it."""
    tensors = open_gguf(files.path).tensors
    largest = 1
    for path, parameter in parameters(model):
        matrix = parameter.declared
        if isinstance(matrix, Matrix) and matrix.shard is Axis.IN:
            for piece in weight_pieces(architecture.gguf, path, matrix, parameter.shard):
                if piece.name in tensors:
                    largest = max(largest, block_of(tensors[piece.name].type)[0])
    return largest
