"""Linear layers on torch's own GEMM, with the weight packed once if oneDNN supports it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_PACK_ROWS_HINT = 64  # a hint to oneDNN; the packed layout works for any number of rows


@dataclass(frozen=True, slots=True, eq=False)
class LibraryLinear:
    """A weight [out_features, in_features] in the layout of torch's GEMM (`packed`: oneDNN's own)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    packed: bool


def prepare(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LibraryLinear:
    """Pack a bfloat16 CPU weight for oneDNN if the CPU supports it; keep every other weight unchanged."""
    out_features, in_features = weight.shape
    # oneDNN's packed layouts are for CPUs.
    packable = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    packed = packable and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
    return LibraryLinear(weight, bias, out_features, in_features, packed)


def linear(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype. The library chooses the order of summation."""
    if weight.packed:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight.weight, weight.bias, "none", [], "")
    return F.linear(x, weight.weight, weight.bias)


def linear_by_head(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """[T, H, in] -> [T, H * out]: each head times its rows of the weight, in x's dtype."""
    rows = weight.weight.to_dense() if weight.packed else weight.weight
    of_heads = rows.view(x.shape[1], -1, x.shape[2])
    return torch.bmm(x.transpose(0, 1), of_heads.transpose(1, 2)).transpose(0, 1).flatten(1)


def logits(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """[S, in] -> float32 [S, out]; on a CPU, and with a bias, the library rounds to x's dtype first."""
    # torch.mm takes out_dtype on GPUs alone.
    if x.is_cuda and x.dtype != torch.float32 and weight.bias is None:
        return torch.mm(x, weight.weight.t(), out_dtype=torch.float32)
    return linear(x, weight).float()
