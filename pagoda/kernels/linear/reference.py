"""The definition of a linear layer: multiply and sum in float32, round once.

`sum_by_segments` is the order of summation of the native kernels, on any CPU.
"""

from dataclasses import dataclass

import torch

from pagoda.kernels.linear.forms import K_SEGMENT, X_GROUP
from pagoda.kernels.linear.quantize import (
    CodedWeight,
    Fp8Weight,
    QuantizedWeight,
    quantize_rows,
    quantize_vectors,
    values_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """A weight [out_features, in_features] as it was loaded, with its bias [out_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers that are multiplied with the weight, float32 [T, in]."""
        return x.float()


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear(PlainLinear):
    """A weight of 8-bit floats, whose input is rounded to 8-bit floats too."""

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_vectors(x)
        return codes.float() * scales.unsqueeze(-1)


def prepare_quantized(weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None) -> PlainLinear:
    """Return the values that the codes stand for; those of groups rounded to `dtype`."""
    if isinstance(weight, Fp8Weight):
        return Fp8Linear(weight.dequantize(), bias)
    return PlainLinear(values_of(weight).to(dtype), bias)


def linear(x: torch.Tensor, weight: PlainLinear) -> torch.Tensor:
    """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype."""
    return logits(x, weight).to(x.dtype)


def linear_by_head(x: torch.Tensor, weight: PlainLinear) -> torch.Tensor:
    """[T, H, in] -> [T, H * out]: each head times its rows of the weight, in x's dtype."""
    of_heads = weight.weight.float().view(x.shape[1], -1, x.shape[2])
    return torch.einsum("thi,hoi->tho", weight.inputs(x), of_heads).flatten(1).to(x.dtype)


def logits(x: torch.Tensor, weight: PlainLinear) -> torch.Tensor:
    """[S, in] -> float32 [S, out]."""
    out = weight.inputs(x) @ weight.weight.float().T
    return out if weight.bias is None else out + weight.bias.float()


def sum_by_segments(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[S, in] -> float32 [S, out] = x @ weight.T in the native kernels' order, whatever the batch: slow.

    Along `in`, each K_SEGMENT elements are a chain of fused multiply-adds from zero, and these sums are added in order.
    Of bfloat16, the second element of each pair comes first.
    """
    in_pairs = weight.dtype == torch.bfloat16
    x, weight = x.float(), weight.float()
    total: torch.Tensor | None = None
    for begin in range(0, x.shape[1], K_SEGMENT):
        end = min(begin + K_SEGMENT, x.shape[1])
        segment = torch.zeros(len(x), len(weight))
        for at in range(begin, end):
            k = at ^ 1 if in_pairs and at ^ 1 < end else at
            segment = _fused(x[:, k, None], weight[:, k], segment)
        total = segment if total is None else total + segment
    return torch.zeros(len(x), len(weight)) if total is None else total


def sum_by_groups(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[S, in] -> float32 [S, out] as `sum_by_segments`, of a weight with integer scales: each X_GROUP is one element.

    x is quantised by these. Of each, what is multiplied with minima comes first: sums of integers, which are exact.
    """
    assert weight.units is not None
    sub_group, per_unit = weight.form.sub_group, weight.group // X_GROUP
    codes, x_scales = quantize_rows(x, X_GROUP)
    of_x = codes.long().unflatten(1, (-1, X_GROUP // sub_group, sub_group))
    of_w = (weight.codes.long() - weight.form.middle).unflatten(1, (-1, *of_x.shape[2:]))
    scales = weight.scales.long().unflatten(1, (-1, of_x.shape[2]))
    total: torch.Tensor | None = None
    for begin in range(0, of_x.shape[1], K_SEGMENT // X_GROUP):
        segment = torch.zeros(len(x), len(of_w))
        for g in range(begin, min(begin + K_SEGMENT // X_GROUP, of_x.shape[1])):
            x_scale, units = x_scales[:, g, None], weight.units[:, g // per_unit].float()
            if weight.offsets is not None:
                minima = weight.offsets.long().view_as(scales)[:, g]
                segment = _fused((of_x[:, g].sum(-1) @ minima.T).float(), units[:, 1] * x_scale, segment)
            sums = torch.einsum("tbi,obi,ob->to", of_x[:, g], of_w[:, g], scales[:, g])
            segment = _fused(sums.float(), units[:, 0] * x_scale, segment)
        total = segment if total is None else total + segment
    return torch.zeros(len(x), len(of_w)) if total is None else total


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded to float32 once."""
    product, addend = a.double() * b.double(), c.double()  # the product is exact
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    # What was lost makes the last bit odd, so that rounding again cannot take it for a tie.
    is_even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).double())
    return torch.where((error != 0) & is_even, odd, total).float()
