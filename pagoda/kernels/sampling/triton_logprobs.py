"""Log-probabilities in Triton: a row's sum has one order, and of equal logits the lower id comes first.

torch's own sum over the vocabulary, and which of equal logits its `topk` takes, depend on how many rows there are.
"""

import torch
import triton.language as tl

from pagoda.kernels.sampling.reference import LogprobTensors
from pagoda.kernels.triton_support import jit, jit_for_any

_BLOCK = 2048


@jit
def _log_sum(logits, stride, vocab, chosen, normalisers, ranks, BLOCK: tl.constexpr):
    """Store each row's log(sum(exp)), and the rank of its chosen id."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    own = tl.load(row + tl.load(chosen + index))
    top = tl.full([], float("-inf"), tl.float32)
    above = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        top = tl.maximum(top, tl.max(tl.where(value == value, value, float("-inf")), 0))
        above += tl.sum((value > own).to(tl.int32), 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(row + at, mask=at < vocab, other=float("-inf")) - shift)
    tl.store(normalisers + index, tl.log(tl.sum(total, 0)) + shift)
    tl.store(ranks + index, above + 1)


@jit_for_any("k")
def _best_ids(logits, stride, vocab, best, ids, k, BLOCK: tl.constexpr):
    """Store the k best ids of each row, ascending: those above the least of the best values, and the first at it."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    cut = tl.load(best + index.to(tl.int64) * k + k - 1)
    num_above = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        num_above += tl.sum(((value > cut) & (at < vocab)).to(tl.int32), 0)
    num_ties = k - num_above
    found = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        is_tie = ((value == cut) & (at < vocab)).to(tl.int32)
        is_first = (is_tie > 0) & (seen + tl.cumsum(is_tie, 0) - is_tie < num_ties)
        is_best = (((value > cut) & (at < vocab)) | is_first).to(tl.int32)
        place = found + tl.cumsum(is_best, 0) - is_best
        tl.store(ids + index.to(tl.int64) * k + place, at.to(tl.int64), mask=(is_best > 0) & (place < k))
        found += tl.sum(is_best, 0)
        seen += tl.sum(is_tie, 0)


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> LogprobTensors:
    """See reference.top_logprobs; among equals the lower id comes first."""
    (rows, vocab), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = chosen.unsqueeze(1)
    normalisers = torch.empty((rows, 1), dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        arguments = logits, logits.stride(0), vocab, chosen.contiguous(), normalisers, ranks
        _log_sum[(rows,)](*arguments, _BLOCK, num_warps=8)
        if k:
            ids = torch.cat([ids, _best(logits, min(k, vocab))], 1)
    return LogprobTensors(token_ids=ids.int(), logprobs=logits.gather(1, ids) - normalisers, ranks=ranks)


def _best(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the k best, int64 [n, k], the best first."""
    values, ids = logits.topk(k, dim=-1)  # whichever ids they are of, the values are the k best
    arguments = logits, logits.stride(0), logits.shape[1], values, ids
    _best_ids[(len(logits),)](*arguments, k, _BLOCK, num_warps=8)
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)
