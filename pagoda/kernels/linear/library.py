"""Linear layers through torch's own GEMM, with the weight packed once where oneDNN offers it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_PACK_ROWS_HINT = 64  # rows oneDNN is told to expect; its packed layout serves every other number too


@dataclass(frozen=True, slots=True, eq=False)
class LibraryLinear:
    """A weight [out_features, in_features] in the layout of torch's GEMM (`packed`: oneDNN's own)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    packed: bool


def prepare(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LibraryLinear:
    """Pack a bfloat16 CPU weight for oneDNN where that is faster; keep every other weight as it is."""
    out_features, in_features = weight.shape
    packable = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    packed = packable and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
    return LibraryLinear(weight, bias, out_features, in_features, packed)


def linear(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype. Its summation order is the library's own."""
    if weight.packed:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight.weight, weight.bias, "none", [], "")
    return F.linear(x, weight.weight, weight.bias)


def logits(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """[S, in] -> float32 [S, out]; the library rounds to x's dtype before they are widened."""
    return linear(x, weight).float()
