"""Read weights by name from safetensors, GGUF, AWQ, GPTQ or CTranslate2: shapes first, regions of values on demand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from safetensors import SafetensorError, safe_open

from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.kernels.linear.forms import GGUF_TYPES
from pagoda.kernels.linear.quantize import BlockRows, BlockWeight, QuantizedWeight
from pagoda.loading.ctranslate2 import CTranslate2File
from pagoda.loading.gguf_blocks import FLOATS, dequantize, read_codes
from pagoda.loading.gguf_file import GGUFFile, GGUFTensor, open_gguf
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.mxfp4 import BLOCK_VALUES, dequantize_mxfp4
from pagoda.loading.packed_int4 import check_group_order, in_kernel_groups, read_awq, read_gptq, without_zeros
from pagoda.loading.pieces import Region
from pagoda.loading.quantization import MXFP4_BLOCKS, MXFP4_SCALES, WORD_CODES, PackedFormat, packed_format, packed_stem
from pagoda.loading.safetensors_header import read_headers


class Weights(Protocol):
    """A checkpoint's tensors, by their names in the checkpoint."""

    @property
    def bytes_read(self) -> int:
        """Return how many bytes of the files have been read as values, so far."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ConfigError if there is no such tensor."""
        ...

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """Fill `out` (contiguous, any float dtype, any device) with a region, None for the whole tensor.

        Values are converted once. Raises ConfigError for a tensor that cannot be read.
        """
        ...

    def view(self, name: str, region: Region) -> torch.Tensor | None:
        """Return a region as a view of the mapped file, in the type it is stored in; None where it needs converting."""
        ...

    def has_codes(self, name: str) -> bool:
        """Return whether a matrix is stored as codes and scales, which `read_codes` returns."""
        ...

    def read_codes(
        self, name: str, region: Region, order: tuple[int, ...] | None = None
    ) -> QuantizedWeight | BlockWeight | None:
        """Return a region of a matrix as its stored codes and scales; None if it is stored as plain floats.

        order: of the rows of a head, see `reorder_rows`.
        """
        ...


def open_weights(files: ModelFiles, subfolders: Sequence[str] = ()) -> Weights:
    """Open the weights of a model on disk. Raises ConfigError for corrupt or truncated files, and as `packed_format`.

    subfolders: with further safetensors, whose tensors are called `subfolder/name`.
    """
    if files.format == "gguf":
        return GGUFWeights(open_gguf(files.path))
    if files.format == "ctranslate2":
        return CTranslate2Weights(CTranslate2File(files.path))
    weights, stored = SafetensorsWeights(files.path, subfolders), packed_format(files)
    if stored is not None:
        return PackedWeights(weights, stored)
    return MXFP4Weights(weights) if weights.has_mxfp4 else weights


class GGUFWeights:
    """A GGUF file, memory-mapped and dequantised tensor by tensor."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.bytes_read = 0

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

    def view(self, name: str, region: Region) -> torch.Tensor | None:
        tensor = self._file.tensors[name]
        dtype = FLOATS.get(tensor.type)
        if dtype is None:
            return None
        part = self._region(tensor, region)
        if not part.flags.c_contiguous:
            return None
        self.bytes_read += part.nbytes
        return torch.from_numpy(part.reshape(-1)).view(dtype).view(region.shape)

    def has_codes(self, name: str) -> bool:
        return name in self._file.tensors and self._file.tensors[name].type.name in GGUF_TYPES

    def read_codes(self, name: str, region: Region, order: tuple[int, ...] | None = None) -> BlockWeight | None:
        tensor = self._file.tensors[name]
        held = GGUF_TYPES.get(tensor.type.name)
        if held is None:
            return None
        rows, columns = region.shape
        found = self._region(tensor, region)
        self.bytes_read += found.nbytes

        def read() -> QuantizedWeight:
            data = np.ascontiguousarray(found).reshape(-1).data
            return _reordered(read_codes(data, tensor.type, rows, columns), order)

        return BlockWeight(held, (BlockRows(tensor.type.name, found.reshape(rows, -1), order),), columns, read)

    def _bytes(self, tensor: GGUFTensor, region: Region | None) -> memoryview:
        """Return the region's blocks in the mapped file; copied only if columns are left out."""
        if region is None:
            found = self._file.bytes_of(tensor)
        else:
            found = np.ascontiguousarray(self._region(tensor, region)).reshape(-1).data
        self.bytes_read += found.nbytes
        return found

    def _region(self, tensor: GGUFTensor, region: Region) -> np.ndarray:
        """Return the region's blocks as a view of the mapped file: uint8 [rows, blocks, bytes of a block]."""
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        data = self._file.bytes_of(tensor)
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
        return blocks[at] if region.columns is None else blocks[region.rows.start : region.rows.stop, at]


def reorder_rows(rows: torch.Tensor, order: tuple[int, ...] | None) -> None:
    """Put rows into another order, in place, head by head.   order: of the rows of a head; None leaves them."""
    if order is not None:
        heads = rows.view(-1, len(order), *rows.shape[1:])
        heads.copy_(heads[:, order])


def _reordered(weight: QuantizedWeight, order: tuple[int, ...] | None) -> QuantizedWeight:
    for part in (weight.codes, weight.scales, weight.offsets):
        if part is not None:
            reorder_rows(part, order)
    return weight


class CTranslate2Weights:
    """A CTranslate2 file, memory-mapped; its codes of 8 and 16 bits become floats."""

    def __init__(self, file: CTranslate2File) -> None:
        self._file = file
        self.bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._file.parameters

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._file.parameters:
            raise missing_tensor(name, list(self._file.parameters), self._file.path)
        return self._file.parameters[name].shape

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        part = _part_of(torch.from_numpy(np.array(self._file.read(name))), region)
        out.copy_(part)
        self.bytes_read += part.nbytes

    def view(self, name: str, region: Region) -> torch.Tensor | None:
        return None

    def has_codes(self, name: str) -> bool:
        return False

    def read_codes(self, name: str, region: Region, order: tuple[int, ...] | None = None) -> QuantizedWeight | None:
        return None


_FLOATS = {"F64", "F32", "F16", "BF16"}


class SafetensorsWeights:
    """A folder of safetensors, memory-mapped: a tensor's pages are read when it is copied out."""

    def __init__(self, folder: Path, subfolders: Sequence[str] = ()) -> None:
        self._folder = folder
        self.bytes_read = 0
        self._entries = read_headers(folder, subfolders)
        files = {entry.file for entry in self._entries.values()}
        self._open = {file: safe_open(file, framework="pt") for file in files}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            if (stem := packed_stem(name, self._entries)) is not None:
                raise ConfigError(
                    f"{self._folder}: tensor {name!r} is missing, but there is '{stem}.qweight': the weights are "
                    "quantised, and config.json has no quantization_config that says how; fetch the model again"
                )
            raise missing_tensor(name, list(self._entries), self._folder)
        return self._entries[name].shape

    @property
    def has_mxfp4(self) -> bool:
        """Return whether there are matrices of 4-bit floats."""
        return any(name.endswith(MXFP4_BLOCKS) and entry.dtype == "U8" for name, entry in self._entries.items())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor that exists, as safetensors names it."""
        return self._entries[name].dtype

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor that exists, of any dtype, as a view of the mapped file. Raises ConfigError."""
        entry = self._entries[name]
        try:
            return self._open[entry.file].get_tensor(entry.name)
        except SafetensorError as error:
            raise ConfigError(f"{entry.file}: tensor {name!r} cannot be read: {error}") from None

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise ConfigError(f"{entry.file}: tensor {name!r} is {entry.dtype}, which is not supported as a weight")
        part = _part_of(self.mapped(name), region)
        out.copy_(part)
        self.bytes_read += part.nbytes

    def view(self, name: str, region: Region) -> torch.Tensor | None:
        part = _part_of(self.mapped(name), region)
        if part.shape != region.shape or not part.is_contiguous():
            return None
        self.bytes_read += part.nbytes
        return part

    def has_codes(self, name: str) -> bool:
        return False

    def read_codes(self, name: str, region: Region, order: tuple[int, ...] | None = None) -> QuantizedWeight | None:
        return None


def _part_of(tensor: torch.Tensor, region: Region | None) -> torch.Tensor:
    if region is None:
        return tensor
    if region.index is not None:
        tensor = tensor[region.index]
    if region.transposed:
        tensor = tensor.T
    tensor = tensor[region.rows.start : region.rows.stop : region.rows.step]
    if tensor.dim() > 2:  # a convolution's
        tensor = (tensor.movedim(1, -1) if region.channels_last else tensor).flatten(1)
    return tensor if region.columns is None else tensor[:, region.columns.start : region.columns.stop]


def missing_tensor(name: str, known: list[str], path: Path) -> ConfigError:
    hint = nearest(name, known) if len(known) < 5000 else ""
    hint = hint if "did you mean" in hint else ""
    return ConfigError(f"{path}: tensor {name!r} is missing{hint}")


class PackedWeights:
    """`layer.weight` is either that tensor, or made of `layer.qweight`, `.qzeros`, `.scales` and, of GPTQ, `.g_idx`."""

    def __init__(self, weights: SafetensorsWeights, stored: PackedFormat) -> None:
        self._weights, self._stored = weights, stored

    @property
    def bytes_read(self) -> int:
        return self._weights.bytes_read

    def __contains__(self, name: str) -> bool:
        return name in self._weights or packed_stem(name, self._weights) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights. Raises ConfigError as well if the tensors of a packed matrix do not fit together."""
        stem = packed_stem(name, self._weights)
        return self._weights.shape(name) if stem is None else self._check(stem)

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        stem = packed_stem(name, self._weights)
        if stem is None:
            self._weights.read_into(name, out, region)
        else:
            out.copy_(self._read(stem, region).dequantize())

    def view(self, name: str, region: Region) -> torch.Tensor | None:
        return self._weights.view(name, region) if packed_stem(name, self._weights) is None else None

    def has_codes(self, name: str) -> bool:
        return packed_stem(name, self._weights) is not None

    def read_codes(self, name: str, region: Region, order: tuple[int, ...] | None = None) -> QuantizedWeight | None:
        stem = packed_stem(name, self._weights)
        return None if stem is None else _reordered(self._read(stem, region), order)

    def _check(self, stem: str) -> tuple[int, int]:
        """Return (out, in) of a packed matrix."""
        stored, weights = self._stored, self._weights
        words = weights.shape(f"{stem}.qweight")
        if len(words) != 2:
            raise ConfigError(f"tensor '{stem}.qweight' has the shape {words}; a packed matrix has two dimensions")
        rows, columns = words[1], words[0] * WORD_CODES
        if stored.method == "awq":
            rows, columns = words[1] * WORD_CODES, words[0]
        groups = 1 if stored.group is None else -(-columns // stored.group)
        expected = {
            "qweight": (words, ("I32",)),
            "qzeros": ((groups, -(-rows // WORD_CODES)), ("I32",)),
            "scales": ((groups, rows), ("F16", "BF16", "F32")),
        }
        if f"{stem}.g_idx" in weights:
            expected["g_idx"] = (columns,), ("I32", "I64")
        for part, (shape, dtypes) in expected.items():
            name = f"{stem}.{part}"
            if (found := weights.shape(name)) != shape:
                raise ConfigError(
                    f"tensor {name!r} has the shape {found}, {shape} is what '{stem}.qweight' of the shape {words} and "
                    f"group_size = {-1 if stored.group is None else stored.group} ask for"
                )
            if (dtype := weights.dtype(name)) not in dtypes:
                raise ConfigError(f"tensor {name!r} is {dtype}, expected {' or '.join(dtypes)}")
        return rows, columns

    def _read(self, stem: str, region: Region | None) -> QuantizedWeight:
        out_features, in_features = self._check(stem)
        rows = range(out_features) if region is None else region.rows
        columns = range(in_features) if region is None or region.columns is None else region.columns
        # With one group per row, any part of a row is in one group.
        group = self._stored.group or len(columns)
        is_cut = columns.start % group or (columns.stop % group and columns.stop != in_features)
        if self._stored.group is not None and is_cut:
            raise ConfigError(
                f"tensor '{stem}.qweight': columns {columns.start} to {columns.stop} cut its groups of {group}"
            )
        # Whole words of output features, of which the others are then left out.
        words = slice(rows.start // WORD_CODES, -(-rows.stop // WORD_CODES))
        groups = slice(0, 1)
        if self._stored.group is not None:
            groups = slice(columns.start // group, -(-columns.stop // group))
        features = slice(words.start * WORD_CODES, words.stop * WORD_CODES)
        qweight, qzeros, scales = (self._weights.mapped(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
        qzeros, scales = qzeros[groups, words], scales[groups, features]
        is_awq = self._stored.method == "awq"
        if is_awq:
            qweight = qweight[columns.start : columns.stop, words]
        else:
            qweight = qweight[columns.start // WORD_CODES : columns.stop // WORD_CODES, features]
        self._weights.bytes_read += qweight.nbytes + qzeros.nbytes + scales.nbytes
        try:
            if is_awq:
                weight = read_awq(qweight, qzeros, scales, group)
            else:
                if f"{stem}.g_idx" in self._weights:
                    check_group_order(self._weights.mapped(f"{stem}.g_idx"), self._stored.group or in_features)
                weight = read_gptq(qweight, qzeros, scales, group, self._stored.stored_zero)
            first = rows.start - features.start
            weight = weight.rows(first, first + len(rows))
            weight = without_zeros(weight) if self._stored.symmetric else weight
        except ConfigError as error:
            raise ConfigError(f"tensor '{stem}.qweight': {error}") from None
        return in_kernel_groups(weight, self._stored.held_as.group)


class MXFP4Weights:
    """Stacked matrices of 4-bit floats, `X_blocks` and `X_scales`, as a tensor X [experts, in, out] of floats."""

    def __init__(self, weights: SafetensorsWeights) -> None:
        self._weights = weights

    @property
    def bytes_read(self) -> int:
        return self._weights.bytes_read

    def __contains__(self, name: str) -> bool:
        return name in self._weights or name + MXFP4_BLOCKS in self._weights

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights. Raises ConfigError as well if blocks and scales do not fit together."""
        if name + MXFP4_BLOCKS not in self._weights:
            return self._weights.shape(name)
        blocks, scales = self._weights.shape(name + MXFP4_BLOCKS), self._weights.shape(name + MXFP4_SCALES)
        if len(blocks) != 4 or blocks[3] * 2 != BLOCK_VALUES or scales != blocks[:3]:
            raise ConfigError(f"tensor {name + MXFP4_BLOCKS!r} of the shape {blocks} does not fit scales of {scales}")
        return blocks[0], blocks[2] * BLOCK_VALUES, blocks[1]

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        if name + MXFP4_BLOCKS not in self._weights:
            return self._weights.read_into(name, out, region)
        assert region is not None, "experts are read one by one"
        assert region.columns is not None
        rows, columns = region.rows, region.columns
        covering = slice(columns.start // BLOCK_VALUES, -(-columns.stop // BLOCK_VALUES))
        blocks, scales = (
            self._weights.mapped(name + part)[region.index, rows.start : rows.stop : rows.step, covering]
            for part in (MXFP4_BLOCKS, MXFP4_SCALES)
        )
        first = columns.start - covering.start * BLOCK_VALUES
        out.copy_(dequantize_mxfp4(blocks, scales)[:, first : first + len(columns)])
        self._weights.bytes_read += blocks.nbytes + scales.nbytes
        return None

    def view(self, name: str, region: Region) -> torch.Tensor | None:
        return self._weights.view(name, region) if name in self._weights else None

    def has_codes(self, name: str) -> bool:
        return False

    def read_codes(self, name: str, region: Region, order: tuple[int, ...] | None = None) -> QuantizedWeight | None:
        return None
