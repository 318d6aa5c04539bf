"""Read weights by name from safetensors, quantised or not, GGUF or CTranslate2: shapes first, then regions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.kernels.linear.forms import GGUF_TYPES, MXFP4, WeightFormat
from pagoda.kernels.linear.quantize import BlockRows, BlockWeight, QuantizedWeight, UnstackedWeight
from pagoda.loading.ctranslate2 import CTranslate2File, StoredRows
from pagoda.loading.gguf_blocks import FLOATS, dequantize, read_codes
from pagoda.loading.gguf_file import GGUFFile, GGUFTensor, block_of, open_gguf
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.mxfp4 import BLOCK_VALUES, read_mxfp4
from pagoda.loading.packed_codes import packed_weight, scaled_floats
from pagoda.loading.pieces import Region
from pagoda.loading.quantization import MXFP4_BLOCKS, MXFP4_SCALES, STACKED, PackedFormat, packed_format, packed_stem
from pagoda.loading.safetensors_header import TensorEntry, read_headers


class _Entry(Protocol):
    """What a file says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


EntryT = TypeVar("EntryT", bound=_Entry)


class Weights(Generic[EntryT]):
    """A checkpoint's tensors, by their names in the checkpoint. Without more, they are floats that are not mapped.

    bytes_read: how many bytes of the files have been read as values, so far.
    """

    def __init__(self, path: Path, entries: Mapping[str, EntryT]) -> None:
        self._path, self._entries = path, entries
        self.bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def wrong(self, name: str, what: str) -> ConfigError:
        """Return the error that says `what` is wrong with a tensor, and in which file."""
        return ConfigError(f"{self._path}: tensor {name!r} {what}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ConfigError if there is no such tensor."""
        if name not in self._entries:
            hint = nearest(name, list(self._entries)) if len(self._entries) < 5000 else ""
            raise self.wrong(name, f"is missing{hint if 'did you mean' in hint else ''}")
        return self._entries[name].shape

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """Fill `out` (contiguous, any float dtype, any device) with a region, None for the whole tensor.

        Values are converted once. Raises ConfigError for a tensor that cannot be read.
        """
        raise NotImplementedError

    def view(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a region as a view of the mapped file; None where it is not stored in this type, or in pieces."""
        return None

    def has_codes(self, name: str) -> bool:
        """Return whether `read_codes` returns a matrix as codes and scales, in the order of its elements."""
        return False

    def read_codes(
        self, name: str, region: Region, head_order: tuple[int, ...] | None = None
    ) -> UnstackedWeight | None:
        """Return a region of a matrix as its stored codes and scales; None if it is stored as floats, of 8 bits too.

        head_order: of the rows of a head, see `reorder_rows`.
        """
        return None


def open_weights(files: ModelFiles, subfolders: Sequence[str] = ()) -> Weights:
    """Open the weights of a model on disk. Raises ConfigError for corrupt or truncated files, and as `packed_format`.

    subfolders: with further safetensors, whose tensors are called `subfolder/name`.
    """
    if files.format == "gguf":
        return GGUFWeights(open_gguf(files.path))
    if files.format == "ctranslate2":
        return CTranslate2Weights(CTranslate2File(files.path))
    stored = packed_format(files)
    if stored is None:
        return SafetensorsWeights(files.path, subfolders)
    return MXFP4Weights(files.path) if stored.layout is STACKED else PackedWeights(files.path, stored, subfolders)


class GGUFWeights(Weights[GGUFTensor]):
    """A GGUF file, memory-mapped: the codes of its blocks, or floats, tensor by tensor."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file.path, file.tensors)
        self._file = file

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        tensor = self._entries[name]
        try:
            dequantize(self._bytes(tensor, region), tensor.type, out)
        except NotImplementedError:
            raise self.wrong(name, f"is {tensor.type.name}, which cannot be dequantised") from None

    def view(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor | None:
        tensor = self._entries[name]
        if FLOATS.get(tensor.type) is not dtype:
            return None
        part = self._region(tensor, region)
        if not part.flags.c_contiguous:
            return None
        self.bytes_read += part.nbytes
        return torch.from_numpy(part.reshape(-1)).view(dtype).view(region.shape)

    def has_codes(self, name: str) -> bool:
        return name in self._entries and self._entries[name].type.name in GGUF_TYPES

    def read_codes(self, name: str, region: Region, head_order: tuple[int, ...] | None = None) -> BlockWeight | None:
        tensor = self._entries[name]
        held = GGUF_TYPES.get(tensor.type.name)
        if held is None:
            return None
        rows, columns = region.shape
        found = self._region(tensor, region)
        self.bytes_read += found.nbytes

        def read() -> QuantizedWeight:
            data = np.ascontiguousarray(found).reshape(-1).data
            return read_codes(data, tensor.type, rows, columns).reordered(head_order)

        return BlockWeight(held, (BlockRows(tensor.type.name, found.reshape(rows, -1), head_order),), columns, read)

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
        block, block_bytes = block_of(tensor.type)
        data = self._file.bytes_of(tensor)
        blocks = np.frombuffer(data, np.uint8).reshape(*tensor.shape[:-1], -1, block_bytes)
        if region.columns is not None and len(tensor.shape) == 1:  # a matrix of one row
            blocks = blocks[None]
        if region.index is not None:
            blocks = blocks[region.index]
        columns = region.columns if region.columns is not None else region.rows
        if columns.start % block or columns.stop % block:
            raise self.wrong(
                tensor.name,
                f"has {tensor.type.name} blocks of {block} values, which columns {columns.start} to {columns.stop} cut",
            )
        at = slice(columns.start // block, columns.stop // block)
        return blocks[at] if region.columns is None else blocks[region.rows.start : region.rows.stop, at]


def reorder_rows(rows: torch.Tensor, head_order: tuple[int, ...] | None) -> None:
    """Put the rows of each head into another order, in place.   head_order: where each comes from; None leaves them."""
    if head_order is not None:
        heads = rows.view(-1, len(head_order), *rows.shape[1:])
        heads.copy_(heads[:, head_order])


class CTranslate2Weights(Weights[StoredRows]):
    """A CTranslate2 file, memory-mapped; its codes of 8 and 16 bits become floats."""

    def __init__(self, file: CTranslate2File) -> None:
        super().__init__(file.path, file.parameters)
        self._file = file

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        part = _part_of(torch.from_numpy(np.array(self._file.read(name))), region)
        out.copy_(part)
        self.bytes_read += part.nbytes


_FLOATS = {"F64", "F32", "F16", "BF16"}


class SafetensorsWeights(Weights[TensorEntry]):
    """A folder of safetensors, memory-mapped: a tensor's pages are read when it is copied out."""

    def __init__(self, folder: Path, subfolders: Sequence[str] = ()) -> None:
        super().__init__(folder, read_headers(folder, subfolders))
        files = {entry.file for entry in self._entries.values()}
        self._open = {file: safe_open(file, framework="pt") for file in files}

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries and (stem := packed_stem(name, self._entries)) is not None:
            raise self.wrong(
                name,
                f"is missing, but there is '{stem}.qweight': the weights are quantised, and config.json has no "
                "quantization_config that says how; fetch the model again",
            )
        return super().shape(name)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor that exists, as safetensors names it."""
        return self._entries[name].dtype

    def wrong(self, name: str, what: str) -> ConfigError:
        path = self._entries[name].file if name in self._entries else self._path
        return ConfigError(f"{path}: tensor {name!r} {what}")

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor that exists, of any dtype, as a view of the mapped file. Raises ConfigError."""
        entry = self._entries[name]
        try:
            return self._open[entry.file].get_tensor(entry.name)
        except SafetensorError as error:
            raise self.wrong(name, f"cannot be read: {error}") from None

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise self.wrong(name, f"is {entry.dtype}, which is not supported as a weight")
        part = _part_of(self.mapped(name), region)
        out.copy_(part)
        self.bytes_read += part.nbytes

    def view(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor | None:
        part = _part_of(self.mapped(name), region)
        if part.dtype is not dtype or part.shape != region.shape or not part.is_contiguous():
            return None
        self.bytes_read += part.nbytes
        return part


def _part_of(tensor: torch.Tensor, region: Region | None) -> torch.Tensor:
    if region is None:
        return tensor
    if region.index is not None:
        tensor = tensor[region.index]
    if region.transposed:
        tensor = tensor.T
    if region.columns is not None and tensor.dim() == 1:  # a matrix of one row
        tensor = tensor[None]
    tensor = tensor[region.rows.start : region.rows.stop : region.rows.step]
    if tensor.dim() > 2:  # a convolution's
        tensor = tensor.flatten(1)
    if region.taps and region.columns is not None:
        tensor = tensor.unflatten(1, (-1, region.taps)).mT.flatten(1)
    return tensor if region.columns is None else tensor[:, region.columns.start : region.columns.stop]


class PackedWeights(SafetensorsWeights):
    """`layer.weight` is either that tensor, or made of the tensors that a PackedFormat names."""

    def __init__(self, folder: Path, stored: PackedFormat, subfolders: Sequence[str] = ()) -> None:
        super().__init__(folder, subfolders)
        self._stored = stored

    def __contains__(self, name: str) -> bool:
        return name in self._entries or self._stem(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights. Raises ConfigError as well if the tensors of a packed matrix do not fit together."""
        stem = self._stem(name)
        return super().shape(name) if stem is None else self._check(stem)

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        stem = self._stem(name)
        if stem is None:
            super().read_into(name, out, region)
        elif region is not None and region.taps:
            raise self.wrong(name, "is quantised: the columns of such a matrix change places, which its blocks cannot")
        else:
            turned = None
            if region is not None and region.transposed and region.columns is not None:
                turned = Region(None, region.columns, region.rows)
            stored = turned or region
            has_codes = self._stored.has_codes
            values = self._codes(stem, stored).read().dequantize() if has_codes else self._read_floats(stem, stored)
            out.copy_(values if turned is None else values.T)

    def view(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor | None:
        return super().view(name, region, dtype) if self._stem(name) is None else None

    def has_codes(self, name: str) -> bool:
        return self._stored.has_codes and not self._stored.ordered and self._stem(name) is not None

    def read_codes(self, name: str, region: Region, head_order: tuple[int, ...] | None = None) -> BlockWeight | None:
        stem = self._stem(name)
        return None if stem is None or not self._stored.has_codes else self._codes(stem, region, head_order)

    def _stem(self, name: str) -> str | None:
        return self._stored.stem(name, self._entries)

    def _check(self, stem: str) -> tuple[int, int]:
        """Return (out, in) of a packed matrix."""
        stored, layout, shape_of = self._stored, self._stored.layout, super().shape
        name = f"{stem}.{layout.codes}"
        words = shape_of(name)
        if len(words) != 2:
            raise self.wrong(name, f"has the shape {words}; a packed matrix has two dimensions")
        rows, columns = words[::-1] if layout.transposed else words
        per_word = stored.codes_per_word
        rows, columns = (
            rows * (per_word if layout.words_along_out else 1),
            columns * (per_word if layout.words_along_in else 1),
        )
        groups = 1 if stored.group is None else -(-columns // stored.group)
        zeros, scales = (-(-rows // per_word), groups), [(rows, groups)]
        if not layout.transposed:  # of compressed-tensors, whose scales may be those of the whole matrix
            scales += [(rows,), (1,), ()] if groups == 1 else []
        if stored.block is not None:
            scales = [(-(-rows // stored.block[0]), -(-columns // stored.block[1]))]
        in_words = per_word > 1
        codes_type = "I32" if in_words else "I8" if stored.has_codes else "F8_E4M3"
        expected = {layout.codes: ([words], (codes_type,)), layout.scales: (scales, ("F16", "BF16", "F32"))}
        if stored.has_codes and (layout.transposed or not stored.symmetric):
            expected[layout.zeros] = [zeros], ("I32" if in_words else "I8",)
            if len(scales) > 1 and shape_of(f"{stem}.{layout.zeros}") in scales[2:]:  # never in words
                expected[layout.zeros] = scales[2:], ("I8",)
        if layout.order and (stored.ordered or f"{stem}.{layout.order}" in self._entries):
            expected[layout.order] = [(columns,)], ("I32", "I64")
        for part, (shapes, dtypes) in expected.items():
            shapes = [shape[::-1] for shape in shapes] if layout.transposed and part != layout.codes else shapes
            name = f"{stem}.{part}"
            if (found := shape_of(name)) not in shapes:
                raise self.wrong(
                    name,
                    f"has the shape {found}, {shapes[0]} is what '{stem}.{layout.codes}' of the shape {words} and "
                    f"group_size = {-1 if stored.group is None else stored.group} ask for",
                )
            if (dtype := self.dtype(name)) not in dtypes:
                raise self.wrong(name, f"is {dtype}, expected {' or '.join(dtypes)}")
        return rows, columns

    def _codes(self, stem: str, region: Region | None, head_order: tuple[int, ...] | None = None) -> BlockWeight:
        stored, layout, (out_features, in_features) = self._stored, self._stored.layout, self._check(stem)
        name = f"{stem}.{layout.codes}"
        rows, columns = _ranges(region, out_features, in_features)
        group = stored.group or in_features
        is_cut = columns.start % group != 0 or (columns.stop % group != 0 and columns.stop != in_features)
        group_of = self._group_of(stem, columns, group, is_cut)
        groups = slice(columns.start // group, -(-columns.stop // group))
        if group_of is not None or stored.group is None:
            groups = slice(None)
        elif is_cut:
            raise self.wrong(name, f"has groups of {group}, which columns {columns.start} to {columns.stop} cut")
        # Whole words of output features, of which the others are then left out.
        per_word = stored.codes_per_word
        words = slice(rows.start // per_word, -(-rows.stop // per_word))
        features = slice(words.start * per_word, words.stop * per_word)
        along_in = per_word if layout.words_along_in else 1
        codes = self._part(
            name,
            words if layout.words_along_out else features,
            slice(columns.start // along_in, columns.stop // along_in),
        )
        scales = self._part(f"{stem}.{layout.scales}", features, groups)
        zeros_name = f"{stem}.{layout.zeros}"
        zeros = self._part(zeros_name, words, groups) if zeros_name in self._entries else None
        taken = range(rows.start - features.start, rows.stop - features.start)
        try:
            return packed_weight(stored, codes, scales, zeros, group_of, taken, head_order)
        except ConfigError as error:
            raise self.wrong(name, f"cannot be read: {error}") from None

    def _part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Return rows and columns, as of [out, in], of a tensor; of one that all rows share, that."""
        stored = self.mapped(name)
        if stored.numel() == 1:
            part = stored.view(1, 1)
        elif stored.dim() == 1:
            part = stored[rows, None]
        else:
            part = stored[columns, rows] if self._stored.layout.transposed else stored[rows, columns]
        self.bytes_read += part.nbytes
        return part

    def _group_of(self, stem: str, columns: range, group: int, is_cut: bool) -> torch.Tensor | None:
        """Return the groups of the columns where they are not in the order of the columns.

        is_cut: the columns begin or end within a group, which goes where each has its group.
        """
        name = f"{stem}.{self._stored.layout.order}"
        if name not in self._entries or self._stored.group is None:  # within one group, the order has no effect
            return None
        found = self.mapped(name)
        is_in_order = torch.equal(found.long(), torch.arange(len(found)) // group)
        if is_in_order and not (is_cut and self._stored.ordered):
            return None
        if not self._stored.ordered:
            raise self.wrong(
                f"{stem}.{self._stored.layout.codes}",
                "has groups that are not in order, which the settings do not say; correct desc_act (or actorder) in "
                "quantization_config",
            )
        return found[columns.start : columns.stop]

    def _read_floats(self, stem: str, region: Region | None) -> torch.Tensor:
        layout, shape = self._stored.layout, self._check(stem)
        rows, columns = _ranges(region, *shape)
        codes = self._part(f"{stem}.{layout.codes}", *(slice(of.start, of.stop, of.step) for of in (rows, columns)))
        scales = self.mapped(f"{stem}.{layout.scales}")
        scales = scales.view(-1, 1) if scales.dim() < 2 else scales
        block = self._stored.block or (1 if len(scales) > 1 else shape[0], shape[1])
        return scaled_floats(codes, scales, (rows.start, columns.start), block)


def _ranges(region: Region | None, out_features: int, in_features: int) -> tuple[range, range]:
    if region is None:
        return range(out_features), range(in_features)
    return region.rows, range(in_features) if region.columns is None else region.columns


class MXFP4Weights(SafetensorsWeights):
    """Stacked matrices of 4-bit floats, `X_blocks` and `X_scales`, as a tensor X [experts, in, out] of floats.

    Regions of X are of one matrix, and their columns are whole blocks.
    """

    def __contains__(self, name: str) -> bool:
        return name in self._entries or self.has_codes(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights. Raises ConfigError as well if blocks and scales do not fit together."""
        if not self.has_codes(name):
            return super().shape(name)
        blocks, scales = (super(MXFP4Weights, self).shape(name + of) for of in (MXFP4_BLOCKS, MXFP4_SCALES))
        if len(blocks) != 4 or blocks[3] * 2 != BLOCK_VALUES or scales != blocks[:3]:
            raise self.wrong(name + MXFP4_BLOCKS, f"has the shape {blocks}, which does not fit scales of {scales}")
        for stored in (name + MXFP4_BLOCKS, name + MXFP4_SCALES):
            if (dtype := self.dtype(stored)) != "U8":
                raise self.wrong(stored, f"is {dtype}, expected U8")
        return blocks[0], blocks[2] * BLOCK_VALUES, blocks[1]

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        if not self.has_codes(name):
            return super().read_into(name, out, region)
        assert region is not None, "experts are read one by one"
        out.copy_(read_mxfp4(*self._blocks(name, region)).dequantize())
        return None

    def view(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor | None:
        return super().view(name, region, dtype) if name in self._entries else None

    def has_codes(self, name: str) -> bool:
        return name + MXFP4_BLOCKS in self._entries

    def read_codes(self, name: str, region: Region, head_order: tuple[int, ...] | None = None) -> BlockWeight | None:
        if not self.has_codes(name):
            return None
        blocks, exponents = self._blocks(name, region)
        stored = BlockRows("MXFP4_PAIRS", blocks.flatten(1).numpy(), head_order, exponents.numpy())
        held = WeightFormat(MXFP4, BLOCK_VALUES)
        return BlockWeight(
            held, (stored,), region.shape[1], lambda: read_mxfp4(blocks, exponents).reordered(head_order)
        )

    def _blocks(self, name: str, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a region's blocks and their exponents, as views of the mapped file."""
        rows, columns = region.rows, region.columns
        assert columns is not None
        assert columns.start % BLOCK_VALUES == columns.stop % BLOCK_VALUES == 0, "ranks share whole blocks"
        at = slice(columns.start // BLOCK_VALUES, columns.stop // BLOCK_VALUES)
        blocks, exponents = (
            self.mapped(name + part)[region.index, rows.start : rows.stop : rows.step, at]
            for part in (MXFP4_BLOCKS, MXFP4_SCALES)
        )
        self.bytes_read += blocks.nbytes + exponents.nbytes
        return blocks, exponents
