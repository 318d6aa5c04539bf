"""Random weights of codes, in any form."""

import torch

from pagoda.kernels.linear.forms import Offset, WeightFormat
from pagoda.kernels.linear.quantize import QuantizedWeight, scales_of


def random_codes(held: WeightFormat, out_features: int, in_features: int) -> QuantizedWeight:
    """Return random codes, scales and offsets."""
    form, group = held.form, held.group
    groups = -(-in_features // group)
    codes = torch.randint(0, 1 << form.bits, (out_features, group * groups), dtype=torch.uint8)
    if form.sub_group:
        of_groups = (out_features, groups * group // form.sub_group)
        scales, offsets = torch.randint(-128, 128, of_groups, dtype=torch.int8), None
        if form.offset is Offset.MINIMUM:
            scales, offsets = (torch.randint(0, 64, of_groups, dtype=torch.uint8) for _ in range(2))
        units = torch.randn(out_features, groups, 1 if offsets is None else 2).half() / (32 << form.bits)
        return QuantizedWeight(form, codes, scales, offsets, in_features, group, units=units)
    scales, offsets = (torch.rand(out_features, groups) / (1 << form.bits)).half(), None
    if form.scale_bits == 8:
        scales = scales_of(torch.randint(117, 131, (out_features, groups), dtype=torch.uint8))
    if form.offset is Offset.MINIMUM:
        offsets = (torch.randn(out_features, groups) / 10).half()
    elif form.offset is Offset.ZERO_POINT:
        offsets = torch.randint(0, (1 << form.bits) + 1, (out_features, groups), dtype=torch.int16)
    return QuantizedWeight(form, codes, scales, offsets, in_features, group)
