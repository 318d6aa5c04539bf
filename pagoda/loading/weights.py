"""Read weights by name from safetensors or GGUF: shapes first, regions of values on demand."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.dequantize import dequantize
from pagoda.loading.gguf_codes import read_codes
from pagoda.loading.gguf_file import GGUFFile, GGUFTensor, form_of
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.packed_format import packed_format
from pagoda.loading.packed_weights import PackedWeights
from pagoda.loading.pieces import Region
from pagoda.loading.safetensors_weights import SafetensorsWeights, missing_tensor


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

    def has_codes(self, name: str) -> bool:
        """Return whether a matrix is stored as codes and scales, which `read_codes` returns."""
        ...

    def read_codes(self, name: str, region: Region) -> QuantizedWeight | None:
        """Return a region of a matrix as its stored codes and scales; None if it is stored as plain floats."""
        ...


def open_weights(files: ModelFiles, subfolders: Sequence[str] = ()) -> Weights:
    """Open the weights of a model on disk. Raises ConfigError for corrupt or truncated files, and as `packed_format`.

    subfolders: with further safetensors, whose tensors are called `subfolder/name`.
    """
    if files.format == "gguf":
        return GGUFWeights(GGUFFile(files.path))
    weights, stored = SafetensorsWeights(files.path, subfolders), packed_format(files)
    return weights if stored is None else PackedWeights(weights, stored)


class GGUFWeights:
    """A GGUF file, memory-mapped and dequantised tensor by tensor."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._file.tensors:
            raise missing_tensor(name, list(self._file.tensors), self._file.path)
        return self._file.tensors[name].shape

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        tensor = self._file.tensors[name]
        try:
            dequantize(self._bytes(tensor, region), tensor.type, out)
        except NotImplementedError:
            raise ConfigError(f"{self._file.path}: tensor {name!r}: {tensor.type.name} cannot be dequantised") from None

    def has_codes(self, name: str) -> bool:
        return name in self._file.tensors and form_of(self._file.tensors[name].type) is not None

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
