"""Outline a checkpoint from its config.json alone, to size a model whose weights are not there. No torch."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

from pagoda.base.errors import ConfigError
from pagoda.loading.model_config import build_tree, read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.pieces import stored_tensors
from pagoda.loading.quantization import MXFP4_BLOCKS, MXFP4_SCALES, STACKED, packed_format

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
    for tensor, shape in dict(stored_tensors(architecture.hf[0], model)).items():
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
