"""Read 4-bit weights as AutoAWQ and GPTQ store them, as codes, scales and zero points.

Both keep int32 tensors of eight codes each, lowest bits first, and floating scales [groups, out]. Values are
scale * (code - zero), with a zero per group and output feature.

    AWQ    qweight [in, out / 8], qzeros [groups, out / 8]; the codes of eight output features in the order _AWQ_ORDER
    GPTQ   qweight [in / 8, out], eight elements along `in` per word; qzeros [groups, out / 8], stored as zero - 1 in
           the first version of the format
"""

from dataclasses import replace

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import Q4, Q4_ZERO
from pagoda.kernels.linear.quantize import QuantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature, of eight, of each 4 bits of a word."""

_SYMMETRIC = 8  # the zero of codes that need no zero points


def read_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int) -> QuantizedWeight:
    """Return a weight [out, in] that AutoAWQ's GEMM format stores.   group: the last one may be partial."""
    return _coded(_unpack_awq(qweight), _unpack_awq(qzeros), scales, group)


def read_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int, stored_zero: int = 1
) -> QuantizedWeight:
    """Return a weight [out, in] that GPTQ stores.   stored_zero: added to a stored zero point, 1 or 0."""
    zeros = _unpack(qzeros).T + stored_zero  # 16 is possible: 4 bits do not wrap
    return _coded(_unpack(qweight.T), zeros, scales, group)


def check_group_order(g_idx: torch.Tensor, group: int) -> None:
    """Raise ConfigError for groups in another order than that of the elements (desc_act).

    g_idx: int [in], the group of each element along `in`.
    """
    if not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group):
        raise ConfigError(
            "its groups are not in order (desc_act), which is not supported; quantise the model with desc_act=False"
        )


def without_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a symmetric weight without its zero points. Raises ConfigError if one is not 8."""
    assert weight.offsets is not None
    others = weight.offsets[weight.offsets != _SYMMETRIC]
    if len(others):
        raise ConfigError(
            f"the settings say that it is symmetric (sym = true, or zero_point = false), but it has a zero point of "
            f"{int(others[0])} instead of {_SYMMETRIC}; correct sym, zero_point or checkpoint_format in "
            "quantization_config, or fetch the model again"
        )
    return replace(weight, form=Q4, offsets=None)


def in_kernel_groups(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """Return the same values in groups that divide the weight's; any, if all of a row is one group."""
    if weight.scales.shape[1] > 1:
        return weight.in_groups_of(group)
    padding = -weight.in_features % group
    groups = (weight.in_features + padding) // group
    scales = weight.scales.expand(-1, groups)
    offsets = None if weight.offsets is None else weight.offsets.expand(-1, groups)
    codes = torch.nn.functional.pad(weight.codes[:, : weight.in_features], (0, padding))
    return replace(weight, codes=codes, scales=scales, offsets=offsets, group=group)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, 8 m], lowest bits first."""
    pairs = words.contiguous().view(torch.uint8)  # little-endian
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [8 m, n], output features in order."""
    words = words.T.contiguous()
    codes = torch.empty((words.shape[0], 8, words.shape[1]), dtype=torch.uint8)
    for i, feature in enumerate(_AWQ_ORDER):
        codes[:, feature] = (words >> (4 * i)) & 15
    return codes.flatten(0, 1)


def _coded(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int) -> QuantizedWeight:
    """codes: uint8 [out, in].   zeros: uint8 [out, groups].   scales: [groups, out]."""
    in_features = codes.shape[1]
    codes = torch.nn.functional.pad(codes, (0, -in_features % group))
    return QuantizedWeight(Q4_ZERO, codes, scales.T.contiguous(), zeros.contiguous(), in_features, group)
