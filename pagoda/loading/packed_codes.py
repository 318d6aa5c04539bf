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
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.quantization import AWQ, PackedFormat

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature, of eight, of each 4 bits of a word."""


def read_packed(
    stored: PackedFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Return a weight [out, in], in the form and the groups that it is held in.

    codes, scales, zeros: as stored, zeros may be absent.   group_of: int [in], the group of each element if groups are
    not in the order of the elements.
    Raises ConfigError for a weight that is said to be symmetric and is not, and for groups that do not exist.
    """
    middle = 1 << (stored.bits - 1)
    if stored.layout.transposed:
        codes, scales = codes.T, scales.T
        zeros = None if zeros is None else zeros.T
    if stored.layout is AWQ:
        codes = _unpack_awq(codes)
        zeros = None if zeros is None else _unpack_awq(zeros)
    elif stored.layout.words_along_in:
        codes = _unpack(codes, stored.bits)
        if zeros is not None and zeros.dtype is torch.int32:
            zeros = _unpack(zeros.T, stored.bits).T
    else:
        codes = codes.view(torch.uint8) ^ 128
    if zeros is not None:
        signed = middle if zeros.dtype is torch.int8 else 0
        zeros = zeros[: len(codes)].to(torch.int16) + (signed + stored.stored_zero)  # do not wrap: 2^bits is possible
        zeros = zeros.expand(len(codes), -1)
        if stored.symmetric:
            _check_symmetric(zeros, middle)
    scales = scales.expand(len(codes), -1)
    if stored.symmetric:
        offsets = None
    else:
        offsets = zeros if zeros is not None else torch.full_like(scales, middle, dtype=torch.int16)
        # Triton's kernels tell zero points from minima by this type; of 8 bits they have no kernel.
        offsets = offsets.to(torch.uint8) if stored.bits < 8 else offsets
    form, group = stored.held_as.form, stored.held_as.group
    if group_of is not None:
        return _in_order_of_groups(QuantizedWeight(form, codes, scales, offsets, codes.shape[1], group), group_of)
    return _in_groups_of(group, QuantizedWeight(form, codes, scales, offsets, codes.shape[1], stored.group or 0))


def _check_symmetric(zeros: torch.Tensor, middle: int) -> None:
    others = zeros[zeros != middle]
    if len(others):
        raise ConfigError(
            f"the settings say that it is symmetric (sym = true, or zero_point = false), but it has a zero point of "
            f"{int(others[0])} instead of {middle}; correct sym, zero_point or checkpoint_format in "
            "quantization_config, or fetch the model again"
        )


def _in_groups_of(group: int, weight: QuantizedWeight) -> QuantizedWeight:
    """Return the same values in groups that divide the weight's; any, if all of a row is one group (0)."""
    if weight.group:
        padding = -weight.in_features % weight.group
        weight = replace(weight, codes=torch.nn.functional.pad(weight.codes, (0, padding)))
        return weight if weight.group == group else weight.in_groups_of(group)
    groups = -(-weight.in_features // group)
    codes = torch.nn.functional.pad(weight.codes, (0, -weight.in_features % group))
    offsets = None if weight.offsets is None else weight.offsets.expand(-1, groups)
    return replace(weight, codes=codes, scales=weight.scales.expand(-1, groups), offsets=offsets, group=group)


def _in_order_of_groups(weight: QuantizedWeight, group_of: torch.Tensor) -> QuantizedWeight:
    """Sort the elements by their groups and pad each to a multiple of `weight.group`."""
    group_of, groups, size = group_of.long(), weight.scales.shape[1], weight.group
    if ((group_of < 0) | (group_of >= groups)).any():
        raise ConfigError(f"its g_idx has groups from {int(group_of.min())} to {int(group_of.max())}, of {groups}")
    by_group = torch.argsort(group_of, stable=True)
    counts = torch.bincount(group_of, minlength=groups)
    padded = (counts + size - 1) // size * size
    # Each element moves on by the padding of the groups before its own.
    shift = (padded - counts).cumsum(0) - (padded - counts)
    at = torch.arange(len(group_of)) + shift[group_of[by_group]]
    total = int(padded.sum())
    order = torch.full((total,), -1, dtype=torch.int32)
    order[at] = by_group.to(torch.int32)
    codes = torch.zeros(len(weight.codes), total, dtype=torch.uint8)
    codes[:, at] = weight.codes[:, by_group]
    kept = torch.repeat_interleave(torch.arange(groups), padded // size)
    offsets = None if weight.offsets is None else weight.offsets[:, kept]
    return replace(weight, codes=codes, scales=weight.scales[:, kept], offsets=offsets, order=order)


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
    packed = words.contiguous().view(torch.uint8)  # little-endian
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [8 n, m], output features in order."""
    words = words.contiguous()
    codes = torch.empty((words.shape[0], 8, words.shape[1]), dtype=torch.uint8)
    for i, feature in enumerate(_AWQ_ORDER):
        codes[:, feature] = (words >> (4 * i)) & 15
    return codes.flatten(0, 1)
