"""Mixture of experts in Triton: tokens are routed, sorted by expert, and each expert's tokens multiplied tile by tile,
without a word to the host.

Routing has one program per token, which sums in one order whatever the batch is. A *pair* is a token and one of its
experts, token * top_k + rank. Tiles have one size, and an element is summed in steps of one size: a token's result does
not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from pagoda.kernels.activation.triton_activation import activate, gate
from pagoda.kernels.linear.triton_forms import TritonWeight, step_size
from pagoda.kernels.linear.triton_linear import rows_for
from pagoda.kernels.linear.triton_product import product, scaled
from pagoda.kernels.moe import reference
from pagoda.kernels.triton_support import jit
from pagoda.ops.declare import Activation

_LAST_ID = tl.constexpr(2**31 - 1)


@jit
def _route(
    logits, experts, weights, stride, num_experts,
    RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """experts, weights [T, TOP_K] of logits [T, experts], the largest first, of equals the lower id."""
    token = tl.program_id(0).to(tl.int64)
    at, rank_at = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    inside = at < num_experts
    logit = tl.load(logits + token * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    weight = tl.exp(logit - tl.max(logit, 0))
    weight = weight / tl.sum(weight, 0)
    key = tl.where(logit == logit, logit, float("inf"))  # NaN goes first, and every rank has an expert
    is_left = inside
    chosen = tl.zeros([BLOCK_K], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for rank in range(TOP_K):
        best = tl.max(tl.where(is_left, key, float("-inf")), 0)
        expert = tl.min(tl.where(is_left & (key == best), at, _LAST_ID), 0)
        of_expert = tl.sum(tl.where(at == expert, weight, 0.0), 0)
        tl.store(experts + token * TOP_K + rank, expert)
        chosen = tl.where(rank_at == rank, of_expert, chosen)
        total += of_expert
        is_left &= at != expert
    if RENORMALIZE:
        chosen = chosen / total
    tl.store(weights + token * TOP_K + rank_at, chosen, mask=rank_at < TOP_K)


def route(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best: int = 1,
    factor: float = 1.0,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference. There is a kernel for a softmax without a bias; the rest is computed in torch."""
    if sigmoid or bias is not None:
        return reference.route(
            router_logits, top_k, renormalize, sigmoid, bias, groups, top_groups, best, factor, factors
        )
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    tokens, num_experts = logits.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    blocks = triton.next_power_of_2(top_k), triton.next_power_of_2(num_experts)
    if tokens:
        _route[(tokens,)](
            logits, experts, weights, logits.stride(0), num_experts, renormalize, top_k, *blocks, num_warps=1
        )
    weights = weights if factor == 1.0 else weights * factor
    return experts, weights if factors is None else weights * factors[experts]


_BLOCK_M, _BLOCK_N = 64, 64


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
    x, codes, scales, minima, row_scales, out, pairs, first_pairs, num_experts, pairs_per_row, out_features,
    in_features, expert_stride, code_stride, expert_scale_stride, scale_stride, steps,
    FORM: tl.constexpr, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr,
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
        source = pair // pairs_per_row
        of_expert = expert.to(tl.int64) * expert_scale_stride + column
        acc = product(
            (codes + expert.to(tl.int64) * expert_stride + column.to(tl.int64) * code_stride, scales + of_expert,
             minima + of_expert, has_column, scale_stride),
            (x + source * in_features, has_row, in_features),
            0, steps, FORM, HAS_MINIMA, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = scaled(acc, row_scales + source, has_row, scales + of_expert, has_column, FORM)
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


class TritonMoE:
    """`moe` of the op table.   multiplies_fp8: see TritonLinear."""

    def __init__(self, multiplies_fp8: bool = True) -> None:
        self._multiplies_fp8 = multiplies_fp8

    def moe(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        gate_up: TritonWeight,
        down: TritonWeight,
        activation: Activation = Activation.SILU,
        alpha: float = 1.0,
        limit: float = 0.0,
        scales_input: bool = False,
    ) -> torch.Tensor:
        """See reference. There is no kernel with a limit: `stack` refuses biases, which such experts have."""
        if limit:
            raise NotImplementedError(f"moe has no Triton kernel with limit={limit}, alpha={alpha}")
        (tokens, top_k), hidden = experts.shape, x.shape[1]
        rows, per_row = (reference.scaled_input(x, weights), 1) if scales_input else (x.contiguous(), top_k)
        of_pair = experts.flatten()
        pairs = of_pair.argsort(stable=True)
        counts = torch.zeros(gate_up.num_experts + 1, dtype=torch.int64, device=x.device)
        first_pairs = counts.index_add_(0, of_pair + 1, torch.ones_like(of_pair)).cumsum(0)
        up = self._multiply(rows, gate_up, pairs, first_pairs, per_row, x.dtype)
        is_gated = gate_up.out_features != down.in_features
        active = (gate if is_gated else activate)(up, activation)
        parts = self._multiply(active, down, pairs, first_pairs, 1, torch.float32)
        weights = torch.ones_like(weights) if scales_input else weights.contiguous()
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
        block = 512
        _weighted_sum[(tokens, triton.cdiv(hidden, block))](parts, weights, out, hidden, top_k, block)
        return out

    def _multiply(
        self,
        x: torch.Tensor,
        weight: TritonWeight,
        pairs: torch.Tensor,
        first_pairs: torch.Tensor,
        pairs_per_row: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """pairs: int64, sorted by expert.   first_pairs: int64 [E + 1], where those of each expert begin."""
        out = torch.empty((len(pairs), weight.out_features), dtype=dtype, device=x.device)
        num_tiles = len(pairs) // _BLOCK_M + weight.num_experts
        x, row_scales, form = rows_for(x, weight, self._multiplies_fp8)
        block_k = step_size(form, weight.group, x.dtype)
        scales, minima = (x if of is None else of for of in (weight.scales, weight.minima))
        _expert_linear[(triton.cdiv(weight.out_features, _BLOCK_N), num_tiles)](
            x, weight.codes, scales, minima, row_scales, out, pairs, first_pairs, weight.num_experts, pairs_per_row,
            weight.out_features, weight.in_features, weight.codes.stride(0), weight.codes.stride(1), scales.stride(0),
            weight.out_features, weight.num_steps(block_k),
            form, weight.minima is not None, weight.group, _BLOCK_M, _BLOCK_N, block_k, num_warps=4, num_stages=3,
        )  # fmt: skip
        return out
