"""The definition of a linear layer: multiply and sum in float32, round once."""

from dataclasses import dataclass

import torch

from pagoda.kernels.linear.quantize import CodedWeight, Fp8Weight, quantize_vectors, values_of


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
