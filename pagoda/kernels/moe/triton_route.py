"""Routing tokens to experts in Triton: one program per token, which sums in one order whatever the batch is."""

import torch
import triton
import triton.language as tl

from pagoda.kernels.triton_jit import jit

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


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.route."""
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    tokens, num_experts = logits.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    blocks = triton.next_power_of_2(top_k), triton.next_power_of_2(num_experts)
    if tokens:
        _route[(tokens,)](
            logits, experts, weights, logits.stride(0), num_experts, renormalize, top_k, *blocks, num_warps=1
        )
    return experts, weights
