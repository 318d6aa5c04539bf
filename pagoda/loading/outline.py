"""Outline a checkpoint from its config.json alone, to size a model whose weights are not there. No torch."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagoda.base.errors import ConfigError
from pagoda.layers.module import parameters
from pagoda.layers.parameter import BiasTable, Matrix, Table, Taps, Vector, whole_of
from pagoda.loading.model_config import build_tree, read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.pieces import bias_pieces, weight_pieces
from pagoda.loading.quantization import MXFP4_BLOCKS, MXFP4_SCALES, STACKED, packed_format
from pagoda.models.base import Model
from pagoda.models.naming import Naming

_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


def outline(settings: Mapping[str, Mapping[str, object]], name: str, folder: Path, codes_bytes: int = 0) -> ModelFiles:
    """Write a model's settings and a safetensors file of the size that its weights would have, with a hole for them.

    settings: what config.json says, and further files, by name.
    folder: an empty one; it takes some KiB of the disk.   codes_bytes: see ModelFiles.
    Raises ConfigError for an architecture that is not supported, and for weights that are packed.
    """
    for file_name, values in settings.items():
        (folder / file_name).write_text(json.dumps(values))
    files = ModelFiles(name, folder, "safetensors", codes_bytes=codes_bytes)
    stored = packed_format(files)
    if stored is not None and stored.layout is not STACKED:
        raise ConfigError(f"model {name}: the size of packed weights is not known from config.json; fetch the model")
    architecture, tree_config = read_architecture(files)
    model = build_tree(files, architecture, tree_config)
    entries: dict[str, object] = {}
    end = 0
    for tensor, shape in dict(_tensors(model, architecture.hf[0])).items():
        (dtype, item_bytes), parts = _DTYPES.get(model.spec.torch_dtype, ("BF16", 2)), {tensor: shape}
        if stored is not None and len(shape) == 3:
            experts, columns, rows = shape
            blocks = experts, rows, columns // 32
            dtype, item_bytes, parts = "U8", 1, {tensor + MXFP4_BLOCKS: (*blocks, 16), tensor + MXFP4_SCALES: blocks}
        for part, size in parts.items():
            begin, end = end, end + item_bytes * math.prod(size)
            entries[part] = {"dtype": dtype, "shape": size, "data_offsets": (begin, end)}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return files


def _tensors(model: Model, naming: Naming) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that loading a model would read."""
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
            case Matrix(tied=None) as matrix:
                shard = whole_of(matrix)
                for expert in range(max(matrix.num_experts, 1)):
                    for piece in weight_pieces(naming, path, matrix, shard, expert):
                        yield piece.name, piece.shape
                    if matrix.bias:
                        for piece in bias_pieces(naming, path, matrix, shard, expert):
                            if piece.is_stored:
                                yield piece.name, piece.shape
            case _:
                pass
