"""Read quantised weights as AutoAWQ, GPTQ and llm-compressor (compressed-tensors) store them, as codes, scales and zero
points.

Values are scale * (code - zero), with a zero per group and output feature. Words are int32 of 8 codes of 4 bits or 4 of
8, lowest bits first.

    AWQ      qweight [in, out / 8], qzeros [groups, out / 8], in the order _AWQ_ORDER; scales [groups, out]
    GPTQ     qweight [in / 8, out]; qzeros [groups, out / 8], stored as zero - 1 in the first version of the format;
             scales [groups, out]; g_idx [in], the group of each element
    PACKED   weight_packed [out, in / 8], weight_zero_point [out / 8, groups], weight_scale [out, groups]; weight_g_idx
    BYTES    weight int8 [out, in], weight_zero_point int8 [out, groups], weight_scale [out, groups]: code + 128

Of the last two, a matrix with one scale has one zero point, int8: zero - 8 of 4 bits, zero - 128 of 8.
"""

from dataclasses import replace

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import WeightFormat
from pagoda.kernels.linear.quantize import BlockWeight, CodeRows, QuantizedWeight
from pagoda.loading.quantization import AWQ, LEAST_GROUP, PackedFormat

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature, of eight, of each 4 bits of a word."""


def packed_weight(
    stored: PackedFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None = None,
    rows: range | None = None,
    head_order: tuple[int, ...] | None = None,
) -> BlockWeight:
    """Return a weight [out, in], in the form and the groups that it is held in.

    codes, scales, zeros: as stored, zeros may be absent.   group_of: int [in], the group of each element if groups are
    not in the order of the elements.   rows: those that are meant, None for all.   head_order: of the rows of a head.
    Raises ConfigError for a weight that is said to be symmetric and is not, and for groups that do not exist.
    """
    if stored.layout.transposed:
        codes, scales, zeros = codes.T, scales.T, None if zeros is None else zeros.T
    out_features, in_features = codes.shape
    if stored.layout.words_along_out:
        out_features *= stored.codes_per_word
    elif stored.layout.words_along_in:
        in_features *= stored.codes_per_word
    elements, groups = None, torch.arange(0, in_features, LEAST_GROUP) // (stored.group or in_features)
    if group_of is not None:
        elements, groups = _sorted_by_groups(group_of, scales.shape[1])
    middle = 1 << (stored.bits - 1)
    zero = stored.stored_zero if zeros is None or zeros.dtype is torch.int32 else middle - 128
    rows, is_awq = range(out_features) if rows is None else rows, stored.layout is AWQ
    piece = CodeRows(codes, scales, zeros, zero, stored.bits, is_awq, groups.int(), rows.start, len(rows), head_order)
    if stored.symmetric and zeros is not None:
        _check_symmetric(_zero_points(piece)[:out_features], middle)
        piece = replace(piece, zeros=None)
    return BlockWeight(
        stored.held_as, (piece,), in_features, lambda: _read(piece, stored.held_as, in_features, elements), elements
    )


def _read(piece: CodeRows, held: WeightFormat, in_features: int, elements: torch.Tensor | None) -> QuantizedWeight:
    """Return the codes of a piece: the definition of what linear/code_rows.cpp packs.

    elements: as QuantizedWeight.input_order.
    """
    if piece.is_awq:
        codes = _unpack_awq(piece.codes)
    elif piece.codes.dtype is torch.int32:
        codes = _unpack(piece.codes, piece.bits)
    else:
        codes = piece.codes.view(torch.uint8) ^ 128
    if elements is None:
        codes = torch.nn.functional.pad(codes, (0, -in_features % held.group))
    else:
        codes = torch.where(elements >= 0, codes[:, elements], 0)
    groups = piece.groups[:: held.group // LEAST_GROUP]
    scales, offsets = piece.scales.expand(len(codes), -1)[:, groups], None
    if piece.zeros is not None:
        offsets = _zero_points(piece)[: len(codes)].expand(len(codes), -1)[:, groups]
        # Triton's kernels tell zero points from minima by this type; of 8 bits they have no kernel.
        offsets = offsets.to(torch.uint8) if piece.bits < 8 else offsets
    weight = QuantizedWeight(held.form, codes, scales, offsets, in_features, held.group, elements)
    return weight.rows(piece.first, piece.first + piece.rows).reordered(piece.head_order)


def _zero_points(piece: CodeRows) -> torch.Tensor:
    """int16 [out, groups], since 2^bits is possible; rows beyond the last if those of words are more."""
    assert piece.zeros is not None
    if piece.zeros.dtype is torch.int8:
        zeros = piece.zeros.to(torch.int16) + 128
    elif piece.is_awq:
        zeros = _unpack_awq(piece.zeros)
    else:
        zeros = _unpack(piece.zeros.T, piece.bits).T
    return zeros.to(torch.int16) + piece.zero


def _check_symmetric(zeros: torch.Tensor, middle: int) -> None:
    others = zeros[zeros != middle]
    if len(others):
        raise ConfigError(
            f"the settings say that it is symmetric (sym = true, or zero_point = false), but it has a zero point of "
            f"{int(others[0])} instead of {middle}; correct sym, zero_point or checkpoint_format in "
            "quantization_config, or fetch the model again"
        )


def _sorted_by_groups(group_of: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements by their groups, each padded to a multiple of LEAST_GROUP, and the group of each as many.

    int32, -1 for padding, as QuantizedWeight.input_order; int64.
    """
    group_of, size = group_of.long(), LEAST_GROUP
    if ((group_of < 0) | (group_of >= groups)).any():
        raise ConfigError(f"its g_idx has groups from {int(group_of.min())} to {int(group_of.max())}, of {groups}")
    by_group = torch.argsort(group_of, stable=True)
    counts = torch.bincount(group_of, minlength=groups)
    padded = (counts + size - 1) // size * size
    # Each element moves on by the padding of the groups before its own.
    shift = (padded - counts).cumsum(0) - (padded - counts)
    order = torch.full((int(padded.sum()),), -1, dtype=torch.int32)
    order[torch.arange(len(group_of)) + shift[group_of[by_group]]] = by_group.to(torch.int32)
    return order, torch.repeat_interleave(torch.arange(groups), padded // size)


def scaled_floats(
    codes: torch.Tensor, scales: torch.Tensor, first: tuple[int, int], block: tuple[int, int]
) -> torch.Tensor:
    """Return the values of 8-bit floats [rows, columns], float32.

    scales: of blocks [ceil(all rows / block[0]), ceil(all columns / block[1])].   first: row and column of the codes.
    """
    rows, columns = (
        torch.arange(start, start + count) // size for start, count, size in zip(first, codes.shape, block, strict=True)
    )
    return codes.float() * scales.float()[rows][:, columns]


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, 32 / bits * m], lowest bits first."""
    # A copy: of one row or column, strides may be those of what it was cut from. Words are little-endian.
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [8 n, m], output features in order."""
    words = words.contiguous()
    codes = torch.empty((words.shape[0], 8, words.shape[1]), dtype=torch.uint8)
    for i, feature in enumerate(_AWQ_ORDER):
        codes[:, feature] = (words >> (4 * i)) & 15
    return codes.flatten(0, 1)
