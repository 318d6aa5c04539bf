"""Weights as the Triton kernels multiply them: plain floats, or codes that a kernel turns into floats tile by tile.

A row of codes is a row of *records*, each of `group` bytes or a multiple of it:

    int8   as many groups as have 64 codes, at least one: a code per byte
    int4   two groups: the codes of the first in the low halves of the bytes, of the second in the high halves
    int6   four groups: the low four bits of groups 0 and 1, those of 2 and 3, and then the high two bits of all, group
           0 lowest
    fp8    e4m3, without groups: one scale per output feature
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import NOT_FOR_TRITON
from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.linear.quantize import CodedWeight, Fp8Weight, QuantizedWeight, codes_of
from pagoda.ops.tensor import LinearWeight

_MOST_PER_LOAD = 64  # elements of a group, so that tiles of long groups fit in shared memory


def step_size(form: str, group: int, dtype: torch.dtype) -> int:
    """Return the elements along K that `product` multiplies at once.   dtype: of the rows."""
    # Tensor cores would round float32: its products are computed in registers, which hold less.
    most = _MOST_PER_LOAD // 2 if dtype == torch.float32 else _MOST_PER_LOAD
    match form:
        case "plain" | "int8" | "fp8":
            return most
        case "fp8 fp8":
            return 128
        case "int6":
            return 4 * group
        case _:  # codes of as many groups as share their bytes
            return 8 // int(form.removeprefix("int")) * min(group, most)


@dataclass(frozen=True, slots=True, eq=False)
class TritonWeight:
    """A weight [out_features, in_features] that `triton_product` reads; of experts, with one more dimension in front.

    form: "plain", or how `codes` are packed.   codes: floats [out, in], or uint8 [out, bytes].
    scales: float16 [groups, out]; of fp8, float32 [out]; else None.   minima: like scales, or zero points as uint8;
        None if codes are signed.
    """

    form: str
    codes: torch.Tensor
    scales: torch.Tensor | None
    minima: torch.Tensor | None
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    group: int = 0

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    def num_steps(self, step: int) -> int:
        """Return how many steps `product` takes, through whole records."""
        stored = self.in_features if self.scales is None or not self.group else self.scales.shape[-2] * self.group
        return -(-stored // step)


def plain(weight: LibraryLinear) -> TritonWeight:
    """The same memory, as a kernel reads it. weight: not packed."""
    return TritonWeight("plain", weight.weight, None, None, weight.bias, weight.out_features, weight.in_features)


def has_kernel(weight: QuantizedWeight) -> bool:
    return weight.input_order is None and weight.form not in NOT_FOR_TRITON


def prepare(weight: CodedWeight, bias: torch.Tensor | None) -> TritonWeight:
    """Pack codes that have a kernel; scales and minima are rounded to float16, zero points kept."""
    if isinstance(weight, Fp8Weight):
        codes = weight.codes.contiguous().view(torch.uint8)
        return TritonWeight("fp8", codes, weight.scales, None, bias, *codes.shape)
    weight = codes_of(weight).for_triton()
    form, in_bytes = f"int{weight.form.bits}", weight.form.groups_per_record
    per_record = max(in_bytes, 64 // weight.group)
    if weight.group not in (16, 32, 64, 128):
        raise ValueError(f"weights in groups of {weight.group} have no kernel; a group has 16, 32, 64 or 128")
    padding = -weight.scales.shape[1] % per_record
    offsets = weight.offsets
    if offsets is not None and offsets.is_floating_point():
        offsets = offsets.half()
    codes = torch.nn.functional.pad(weight.codes, (0, padding * weight.group))
    scales, minima = (
        None if of is None else torch.nn.functional.pad(of, (0, padding)).T.contiguous()
        for of in (weight.scales.half(), offsets)
    )
    groups = codes.unflatten(1, (-1, in_bytes, weight.group))
    if form == "int6":
        low = groups[:, :, 0::2] & 15 | (groups[:, :, 1::2] & 15) << 4
        high = groups >> 4
        high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
        groups = torch.cat((low, high.unsqueeze(2)), dim=2)
    else:
        shifts = torch.arange(0, 8, weight.form.bits, dtype=torch.uint8, device=codes.device).view(1, 1, -1, 1)
        groups = (groups << shifts).sum(dim=2, dtype=torch.uint8)
    packed = groups.flatten(1).contiguous()
    return TritonWeight(form, packed, scales, minima, bias, codes.shape[0], weight.in_features, weight.group)


def stack(experts: Sequence[LinearWeight]) -> TritonWeight:
    """Copy the experts' weights into one tensor per kind.

    Raises ConfigError for one with a bias, and ValueError for one that is packed, and for experts of different forms.
    """
    parts: list[TritonWeight] = []
    for expert in experts:
        if isinstance(expert, LibraryLinear) and not expert.packed:
            expert = plain(expert)
        if not isinstance(expert, TritonWeight):
            raise ValueError("the experts of a layer must be weights for Triton's kernels")
        if expert.bias is not None:
            raise ConfigError("experts with biases (GPT-OSS) have no Triton kernel; take kernels='torch'")
        parts.append(expert)
    alike = {(part.form, part.group, part.out_features, part.in_features, part.minima is None) for part in parts}
    if len(alike) != 1:
        raise ValueError(f"the experts of a layer must be of one shape and form, not of {len(alike)}")
    scales, minima = (
        torch.stack(given) if (given := [of for part in parts if (of := getattr(part, name)) is not None]) else None
        for name in ("scales", "minima")
    )
    return replace(parts[0], codes=torch.stack([part.codes for part in parts]), scales=scales, minima=minima)
