"""Read weights by name from safetensors or GGUF: shapes first, regions of values on demand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from safetensors import SafetensorError, safe_open

from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.dequantize import dequantize
from pagoda.loading.gguf_codes import read_codes
from pagoda.loading.gguf_file import GGUFFile, GGUFTensor
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.pieces import Region
from pagoda.loading.safetensors_header import read_headers

_FLOATS = {"F64", "F32", "F16", "BF16"}


class Weights(Protocol):
    """A checkpoint's tensors, by their names in the checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ConfigError if there is no such tensor."""
        ...

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """Fill `out` (contiguous, any float dtype, any device) with a region, None for the whole tensor.

        Values are converted once. Raises ConfigError for a tensor that cannot be read.
        """
        ...

    def read_codes(self, name: str, region: Region) -> QuantizedWeight | None:
        """Return a region of a matrix as its stored codes and scales; None if it is stored as plain floats."""
        ...


def open_weights(files: ModelFiles, subfolders: Sequence[str] = ()) -> Weights:
    """Open the weights of a model on disk. Raises ConfigError for corrupt or truncated files.

    subfolders: with further safetensors, whose tensors are called `subfolder/name`.
    """
    return GGUFWeights(GGUFFile(files.path)) if files.format == "gguf" else SafetensorsWeights(files.path, subfolders)


class SafetensorsWeights:
    """A folder of safetensors, memory-mapped: a tensor's pages are read when it is copied out."""

    def __init__(self, folder: Path, subfolders: Sequence[str] = ()) -> None:
        self._folder = folder
        self._entries = read_headers(folder, subfolders)
        files = {entry.file for entry in self._entries.values()}
        self._open = {file: safe_open(file, framework="pt") for file in files}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            raise _missing(name, list(self._entries), self._folder)
        return self._entries[name].shape

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise ConfigError(f"{entry.file}: tensor {name!r} is {entry.dtype}, which is not supported as a weight")
        try:
            out.copy_(_part_of(self._open[entry.file].get_tensor(entry.name), region))  # a view of the mapped file
        except SafetensorError as error:
            raise ConfigError(f"{entry.file}: tensor {name!r} cannot be read: {error}") from None

    def read_codes(self, name: str, region: Region) -> QuantizedWeight | None:
        return None


class GGUFWeights:
    """A GGUF file, memory-mapped and dequantised tensor by tensor."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._file.tensors:
            raise _missing(name, list(self._file.tensors), self._file.path)
        return self._file.tensors[name].shape

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        tensor = self._file.tensors[name]
        try:
            dequantize(self._bytes(tensor, region), tensor.type, out)
        except NotImplementedError:
            raise ConfigError(f"{self._file.path}: tensor {name!r}: {tensor.type.name} cannot be dequantised") from None

    def read_codes(self, name: str, region: Region) -> QuantizedWeight | None:
        tensor = self._file.tensors[name]
        try:
            return read_codes(self._bytes(tensor, region), tensor.type, *region.shape)
        except NotImplementedError:
            raise ConfigError(f"{self._file.path}: tensor {name!r}: {tensor.type.name} cannot be dequantised") from None

    def _bytes(self, tensor: GGUFTensor, region: Region | None) -> memoryview:
        """Return the region's blocks in the mapped file; copied only if columns are left out."""
        data = self._file.bytes_of(tensor)
        if region is None:
            return data
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        blocks = np.frombuffer(data, np.uint8).reshape(*tensor.shape[:-1], -1, block_bytes)
        if region.index is not None:
            blocks = blocks[region.index]
        columns = region.columns if region.columns is not None else region.rows
        if columns.start % block or columns.stop % block:
            raise ConfigError(
                f"{self._file.path}: tensor {tensor.name!r}: columns {columns.start} to {columns.stop} cut its "
                f"{tensor.type.name} blocks of {block} values"
            )
        at = slice(columns.start // block, columns.stop // block)
        part = blocks[at] if region.columns is None else blocks[region.rows.start : region.rows.stop, at]
        return np.ascontiguousarray(part).reshape(-1).data


def _part_of(tensor: torch.Tensor, region: Region | None) -> torch.Tensor:
    if region is None:
        return tensor
    if region.index is not None:
        tensor = tensor[region.index]
    tensor = tensor[region.rows.start : region.rows.stop]
    return tensor if region.columns is None else tensor[:, region.columns.start : region.columns.stop]


def _missing(name: str, known: list[str], path: Path) -> ConfigError:
    hint = nearest(name, known) if len(known) < 5000 else ""
    hint = hint if "did you mean" in hint else ""
    return ConfigError(f"{path}: tensor {name!r} is missing{hint}")
