"""Mixture of experts in Triton: tokens sorted by expert, each expert's tokens multiplied tile by tile, without a word
to the host.

A *pair* is a token and one of its experts, token * top_k + rank. Tiles have one size, and an element is summed in steps
of one size: a token's result does not depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagoda.kernels.activation.triton_activation import silu_mul
from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.moe.reference import route
from pagoda.kernels.triton_jit import jit
from pagoda.ops.tensor import LinearWeight

_BLOCK_M, _BLOCK_N = 64, 64


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """The weights of all experts in one tensor [num_experts, out_features, in_features]."""

    weight: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2]


def stack(experts: Sequence[LinearWeight]) -> StackedExperts:
    """Copy the experts' weights into one tensor. Raises ValueError for one that is packed, or has a bias."""
    weights: list[torch.Tensor] = []
    for expert in experts:
        if not isinstance(expert, LibraryLinear) or expert.packed or expert.bias is not None:
            raise ValueError("the experts of a layer must be plain weights without bias")
        weights.append(expert.weight)
    return StackedExperts(torch.stack(weights))


@jit
def _expert_of(first_pairs, num_experts, tile, BLOCK_M: tl.constexpr):
    """Return the expert of a tile: that of expert e begin at first_pairs[e] // BLOCK_M + e."""
    low, high = 0, num_experts
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(first_pairs + middle) // BLOCK_M + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@jit
def _expert_linear(
    x, weight, out, pairs, first_pairs, num_experts, pairs_per_row, out_features, in_features, expert_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [pairs, out] = x [pairs / pairs_per_row, in] times the weight of each pair's expert."""
    tile = tl.program_id(1)
    expert = _expert_of(first_pairs, num_experts, tile, BLOCK_M)
    begin = tl.load(first_pairs + expert)
    end = tl.load(first_pairs + expert + 1)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    if first < end:
        place = first + tl.arange(0, BLOCK_M)
        has_row = place < end
        pair = tl.load(pairs + place, mask=has_row, other=0)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        has_column = column < out_features
        source = x + (pair // pairs_per_row * in_features)[:, None]
        panel = weight + expert.to(tl.int64) * expert_stride + (column.to(tl.int64) * in_features)[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, in_features, BLOCK_K):
            at = (start + tl.arange(0, BLOCK_K))[None, :]
            a = tl.load(source + at, mask=has_row[:, None] & (at < in_features), other=0.0)
            b = tl.load(panel + at, mask=has_column[:, None] & (at < in_features), other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        target = out + (pair * out_features)[:, None] + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@jit
def _weighted_sum(parts, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, size] = the sum over a token's experts of weight * part, the largest weight first."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    acc = tl.zeros([BLOCK], tl.float32)
    for rank in range(TOP_K):
        pair = token * TOP_K + rank
        acc += tl.load(weights + pair) * tl.load(parts + pair * size + at, mask=inside, other=0.0)
    tl.store(out + token * size + at, acc.to(out.dtype.element_ty), mask=inside)


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: StackedExperts,
    down: StackedExperts,
    top_k: int,
    renormalize: bool,
) -> torch.Tensor:
    """See reference.moe."""
    tokens, hidden = x.shape
    experts, weights = route(router_logits, top_k, renormalize)
    of_pair = experts.flatten()
    pairs = of_pair.argsort(stable=True)
    counts = torch.zeros(gate_up.num_experts + 1, dtype=torch.int64, device=x.device)
    first_pairs = counts.index_add_(0, of_pair + 1, torch.ones_like(of_pair)).cumsum(0)
    active = silu_mul(_multiply(x.contiguous(), gate_up, pairs, first_pairs, top_k, x.dtype))
    parts = _multiply(active, down, pairs, first_pairs, 1, torch.float32)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = 512
    _weighted_sum[(tokens, triton.cdiv(hidden, block))](parts, weights.contiguous(), out, hidden, top_k, block)
    return out


def _multiply(
    x: torch.Tensor,
    weight: StackedExperts,
    pairs: torch.Tensor,
    first_pairs: torch.Tensor,
    pairs_per_row: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """pairs: int64, sorted by expert.   first_pairs: int64 [E + 1], where those of each expert begin."""
    out = torch.empty((len(pairs), weight.out_features), dtype=dtype, device=x.device)
    num_tiles = len(pairs) // _BLOCK_M + weight.num_experts
    _expert_linear[(triton.cdiv(weight.out_features, _BLOCK_N), num_tiles)](
        x, weight.weight, out, pairs, first_pairs, weight.num_experts, pairs_per_row,
        weight.out_features, weight.in_features, weight.weight.stride(0),
        _BLOCK_M, _BLOCK_N, 32 if x.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
