"""The definition of a linear layer: multiply and sum in float32, round once."""

from dataclasses import dataclass

import torch


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


def linear(x: torch.Tensor, weight: PlainLinear) -> torch.Tensor:
    """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype."""
    return logits(x, weight).to(x.dtype)


def logits(x: torch.Tensor, weight: PlainLinear) -> torch.Tensor:
    """[S, in] -> float32 [S, out]."""
    out = x.float() @ weight.weight.float().T
    return out if weight.bias is None else out + weight.bias.float()
