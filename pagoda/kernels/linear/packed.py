"""Linear layers of the native kernels: weights are packed once into panels, in large mappings on huge pages;
`linear/gemm.cpp` multiplies them.
"""

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import BLOCK_TYPES, FLOATS, PANEL, WeightForm
from pagoda.kernels.linear.quantize import (
    BlockRows,
    BlockWeight,
    CodedWeight,
    CodeRows,
    Fp8Weight,
    QuantizedWeight,
    StackedWeight,
    exponents_of,
)
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.native import abi
from pagoda.kernels.native.abi import ExpertStack, PackedLinear, Shared
from pagoda.kernels.native.huge_pages import huge_zeros
from pagoda.kernels.native.library import NativeLibrary
from pagoda.ops.tensor import LinearWeight

_CHUNK = 64 << 20
_ALIGN = 4096  # bytes: the hardware prefetcher of one weight never reads into the next


class Arena(Protocol):
    """Where packed weights are stored."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes], zeros, aligned to 64."""
        ...


class SeparateTensors:
    """An Arena of separate tensors, each freed when it is no longer used."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class WeightArena:
    """Allocates byte tensors one after the other in a few large mappings; single tensors are never freed.

    A mapping is unmapped when all its tensors are gone. Weights that are read one after the other are adjacent.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes], zeros, aligned to 4096."""
        if self._used + num_bytes > self._chunk.numel():
            self._chunk, self._used = huge_zeros(max(num_bytes, _CHUNK)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // _ALIGN) * _ALIGN
        return part


class ScratchArena(WeightArena):
    """For weights that are copied elsewhere: `clear` frees all of its tensors, for those that come next."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return super().allocate(num_bytes).zero_()

    def clear(self) -> None:
        self._used = 0


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] in the kernels' layout.

    dtype: of x; None for quantised weights, which take any.   table_dtype: of its rows as a table.
    next: the weight of the outputs that follow, in another form; out_features counts them, too.
    input_order: see QuantizedWeight.
    address: of the struct that the kernels receive.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype | None
    table_dtype: torch.dtype
    record: Shared
    panels: torch.Tensor
    bias: torch.Tensor | None
    next: "PackedWeight | None" = None
    input_order: torch.Tensor | None = None

    @property
    def address(self) -> int:
        return addressof(self.record)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTable:
    """The rows of a packed weight as an embedding table."""

    weight: PackedWeight

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.table_dtype

    @property
    def is_coded(self) -> bool:
        """Whether its rows are codes, which stand for values near those of the checkpoint."""
        return self.weight.dtype is None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.weight.out_features, self.weight.in_features)


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts(ExpertList[PackedWeight]):
    """Packed weights of one shape and kind, one per expert.

    record: the struct that the kernels receive.   pointers: what it points to.
    """

    record: Shared
    pointers: ctypes.Array[c_void_p]

    @property
    def dtype(self) -> torch.dtype | None:
        return self.weights[0].dtype

    @property
    def address(self) -> int:
        return addressof(self.record)


class PackedLinears:
    """Packs weights. Every output element is summed along `in_features` in one order, independent of the batch."""

    def __init__(self, library: NativeLibrary, threads: int, arena: Arena | None = None) -> None:
        """arena: where panels are stored; by default large mappings that are never freed in part."""
        self._library, self._threads = library, threads
        self._arena = arena if arena is not None else WeightArena()

    @contextmanager
    def packing_into(self, arena: Arena) -> Generator[None, None, None]:
        """Store the panels of what is packed meanwhile in another arena."""
        before, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = before

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        """Return a copy of weight [out, in], float32, bfloat16 or float16, in panels; the original is not kept."""
        return self.prepare_stacked([weight], bias)

    def prepare_stacked(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> PackedWeight:
        """As `prepare`, of parts that are stacked row-wise."""
        dtype, in_features = parts[0].dtype, parts[0].shape[1]
        form = FLOATS[str(dtype).removeprefix("torch.")]
        packed = self._empty(sum(map(len, parts)), in_features, dtype, form, 0, bias, dtype, in_pairs)
        if any(len(part) % PANEL for part in parts[:-1]):  # a panel has rows of two parts
            parts = [torch.cat([*parts])]
        first_row, pack = 0, self._library["pack_words"]
        for part in parts:
            if dtype == torch.bfloat16 and in_features % 2:
                part = torch.nn.functional.pad(part, (0, 1))
            part = part.contiguous()
            pack(packed.address, part.data_ptr(), first_row, len(part), self._threads)
            first_row += len(part)
        return packed

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> PackedWeight:
        """See PrepareOps. Inputs are quantised in the same groups; those are as WeightFormat.native says.

        Raises ValueError for codes without a kernel.
        """
        match weight:
            case Fp8Weight():
                raise ConfigError("quantization='fp8' has no native kernel; take 'int8', or kernels='torch' on a CPU")
            case QuantizedWeight() | BlockWeight():
                return self._prepare_coded(weight, dtype, bias, in_pairs)
            case StackedWeight():
                return self._prepare_stacked(weight, dtype, bias)

    def _prepare_coded(
        self, weight: QuantizedWeight | BlockWeight, dtype: torch.dtype, bias: torch.Tensor | None, in_pairs: bool
    ) -> PackedWeight:
        held, order = weight.held_as.native(), weight.input_order
        in_features = weight.in_features if order is None else len(order)
        packed = self._empty(weight.out_features, in_features, None, held.form, held.group, bias, dtype, in_pairs)
        if order is not None:
            packed.record.input_order = order.data_ptr()
            packed = replace(packed, in_features=weight.in_features, input_order=order)
        if isinstance(weight, QuantizedWeight):
            self._pack_codes(weight if weight.group == held.group else weight.in_groups_of(held.group), packed)
        else:
            self._pack_rows(weight.pieces, packed)
        return packed

    def _pack_codes(self, weight: QuantizedWeight, packed: PackedWeight) -> None:
        codes, scales, offsets = weight.codes.contiguous(), weight.scales, weight.offsets
        if weight.units is not None:
            scales, offsets = weight.units, packed_integers(weight)
        else:
            scales = scales.half() if weight.form.scale_bits == 16 else exponents_of(scales)
            if offsets is not None:
                offsets = offsets.to(torch.float16 if offsets.is_floating_point() else torch.int16).contiguous()
        scales = scales.contiguous()
        offsets_pointer = None if offsets is None else offsets.data_ptr()
        pack = self._library["pack_codes"]
        pack(packed.address, codes.data_ptr(), scales.data_ptr(), offsets_pointer, self._threads)

    def _pack_rows(self, pieces: Sequence[BlockRows | CodeRows], packed: PackedWeight) -> None:
        kept: list[object] = []  # what the records point to
        are_blocks = isinstance(pieces[0], BlockRows)
        records = [_block_rows(of) if isinstance(of, BlockRows) else _code_rows(of, kept) for of in pieces]
        for record, piece in zip(records, pieces, strict=True):
            record.rows = piece.rows
            if piece.head_order is not None:
                order = (c_int64 * len(piece.head_order))(*piece.head_order)
                kept.append(order)
                record.head_order, record.unit = addressof(order), len(order)
        array = (type(records[0]) * len(records))(*records)
        pack = self._library["pack_blocks" if are_blocks else "pack_code_rows"]
        pack(packed.address, addressof(array), self._threads)

    def _prepare_stacked(self, weight: StackedWeight, dtype: torch.dtype, bias: torch.Tensor | None) -> PackedWeight:
        packed: PackedWeight | None = None
        end = 0 if bias is None else len(bias)
        for part in reversed(weight.parts):
            own = None
            if bias is not None:
                own, end = bias[end - part.out_features : end], end - part.out_features
            made = self.prepare_quantized_linear(part, dtype, own)
            if packed is not None:
                made.record.next = packed.address
                made = replace(made, out_features=made.out_features + packed.out_features, next=packed)
            packed = made
        assert packed is not None
        return packed

    def table_of(self, weight: LinearWeight) -> PackedTable | None:
        """See PrepareOps."""
        if not isinstance(weight, PackedWeight) or weight.next is not None or weight.input_order is not None:
            return None
        return PackedTable(weight)

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> PackedExperts:
        """See PrepareOps. Raises ValueError for experts that are not packed alike."""
        weights = tuple(weight for weight in experts if isinstance(weight, PackedWeight))
        alike = {
            (weight.out_features, weight.in_features, weight.dtype, weight.record.kind, weight.record.group)
            for weight in weights
        }
        if (
            len(weights) != len(experts)
            or len(alike) != 1
            or any(weight.next or weight.input_order is not None for weight in weights)
        ):
            raise ValueError(
                f"the experts of a layer must be packed weights of one shape and kind, not {len(weights)} packed of "
                f"{len(experts)}, of {len(alike)} kinds"
            )
        pointers = (c_void_p * len(weights))(*(weight.address for weight in weights))
        return PackedExperts(weights, ExpertStack(addressof(pointers), len(weights)), pointers)

    def _empty(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype | None,
        form: WeightForm,
        group: int,
        bias: torch.Tensor | None,
        table_dtype: torch.dtype,
        in_pairs: bool,
    ) -> PackedWeight:
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, -out_features % PANEL)).contiguous()
        bias_pointer = None if bias is None else bias.data_ptr()
        record = PackedLinear(None, bias_pointer, out_features, in_features, form.kind, group)
        record.in_pairs = in_pairs and out_features % (2 * PANEL) == 0
        panels = self._arena.allocate(self._library["linear_bytes"](addressof(record)))
        record.panels = panels.data_ptr()
        return PackedWeight(out_features, in_features, dtype, table_dtype, record, panels, bias)


def packed_integers(weight: QuantizedWeight) -> torch.Tensor:
    """Return the integer scales and minima of each group as packed.h draws them, uint8 [out, groups, bytes]."""
    assert weight.units is not None
    scales = weight.scales.view(torch.uint8).unflatten(1, (weight.units.shape[1], -1))
    if weight.offsets is None:
        return scales.contiguous()
    minima = weight.offsets.view_as(scales)
    low_scales, high_scales, low_minima, high_minima = (*scales.split(4, dim=2), *minima.split(4, dim=2))
    tops = (low_scales | (high_scales & 48) << 2, low_minima | (high_minima & 48) << 2)
    return torch.cat((*tops, high_scales & 15 | (high_minima & 15) << 4), dim=2)


def _block_rows(piece: BlockRows) -> Shared:
    record = abi.BlockRows(data=piece.data.ctypes.data, row_bytes=piece.data.strides[0])
    record.type = list(BLOCK_TYPES).index(piece.type)
    if piece.exponents is not None:
        record.exponents, record.exponents_row = piece.exponents.ctypes.data, piece.exponents.strides[0]
    return record


def _code_rows(piece: CodeRows, kept: list[object]) -> Shared:
    per_word, scales = 32 // piece.bits, piece.scales.half()
    kept.append(scales)
    along_out, along_in = (per_word, 1) if piece.is_awq else (1, per_word)
    codes = _code_matrix(piece.codes, along_out, along_in, piece.is_awq)
    record = abi.CodeRows(codes=codes, scales=_code_matrix(scales), groups=piece.groups.data_ptr())
    record.first, record.zero = piece.first, piece.zero
    if piece.zeros is not None:
        in_words = piece.zeros.dtype is torch.int32
        record.zeros = _code_matrix(piece.zeros, per_word if in_words else 1, 1, in_words and piece.is_awq)
    return record


def _code_matrix(stored: torch.Tensor, along_out: int = 1, along_in: int = 1, is_awq: bool = False) -> Shared:
    is_signed = stored.dtype is torch.int8
    out_bytes, in_bytes = (
        0 if size == 1 else stride * stored.element_size()
        for size, stride in zip(stored.shape, stored.stride(), strict=True)
    )
    in_bytes *= along_in if is_signed else 1
    return abi.CodeMatrix(stored.data_ptr(), out_bytes, in_bytes, along_out, along_in, is_signed, is_awq)
