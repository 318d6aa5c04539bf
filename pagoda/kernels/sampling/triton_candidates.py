"""The first look at rows of logits that are sampled, in Triton: what the tokens weigh, and which of them can be drawn.

A row is read in chunks, each by a program of its own, so that a few rows keep a whole GPU busy. Tokens are put in
levels by how far their logit is from the largest, in units of the temperature. top_k and top_p keep tokens from the
largest on, nearly always few: those of the first levels, as many levels as there is room for, are written to a short
row, in order of id. Where they suffice, which whoever draws has to see, the long row need not be read again.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from pagoda.kernels.triton_jit import jit

CHUNK = 4096
MOST_CANDIDATES = 4096

_LEVELS = 32
"""The last has all that is farther away."""

_BLOCK = 1024


@jit
def weight_of(logits, largest, temperature):
    """Return float64 weights, 1 at most; see reference.py."""
    return tl.exp((logits.to(tl.float64) - largest) / temperature)


@jit
def is_filtered(top_k, top_p, vocab):
    """Return whether only the tokens of the largest logits are kept."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1)


@jit
def _level_of(logits, largest, temperature, LEVELS: tl.constexpr):
    """Return levels from 0 on: of two tokens, that of the larger logit has not the higher level."""
    per_level = (1.0 / temperature).to(tl.float32)
    distance = (largest - logits) * per_level
    return tl.where(distance < LEVELS - 1, distance, LEVELS - 1).to(tl.int32)


@jit
def _survey(
    logits, stride, vocab, best_values, temperatures, top_ks, top_ps, min_ps, masses, counts,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Write the weight of a chunk's tokens, and how many are in each level. Without a filter min_p alone drops some."""
    draw, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + draw * stride
    temperature = tl.load(temperatures + draw).to(tl.float64)
    if temperature > 0:
        largest = tl.load(best_values + draw)
        has_filter = is_filtered(tl.load(top_ks + draw), tl.load(top_ps + draw), vocab)
        least = tl.where(has_filter, 0.0, tl.load(min_ps + draw).to(tl.float64))
        mass = tl.full([], 0.0, tl.float64)
        count = tl.zeros([LEVELS], tl.int32)
        for start in range(0, CHUNK, BLOCK):
            at = chunk * CHUNK + start + tl.arange(0, BLOCK)
            value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            weights = weight_of(value, largest.to(tl.float64), temperature)
            mass += tl.sum(tl.where((at < vocab) & (weights >= least), weights, 0.0), 0)
            count += tl.histogram(_level_of(value, largest, temperature, LEVELS), LEVELS)
        part = draw * tl.num_programs(1) + chunk
        tl.store(masses + part, mass)
        tl.store(counts + part * LEVELS + tl.arange(0, LEVELS), count)


@jit
def _gather(
    logits, stride, vocab, best_values, temperatures, counts, values, ids, nums,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, MOST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write a chunk's candidates after those of the chunks before it."""
    draw, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + draw * stride
    temperature = tl.load(temperatures + draw).to(tl.float64)
    if temperature > 0:
        largest = tl.load(best_values + draw)
        chunks, levels = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
        part = draw * tl.num_programs(1) + chunks[:, None]
        has_part = chunks[:, None] < tl.num_programs(1)
        count = tl.load(counts + part * LEVELS + levels[None, :], mask=has_part, other=0)
        within = tl.cumsum(tl.sum(count, 0), 0)
        num_levels = tl.sum(((within <= MOST) & (levels < LEVELS - 1)).to(tl.int32), 0)
        of_chunks = tl.sum(tl.where(levels[None, :] < num_levels, count, 0), 1)
        if chunk == 0:
            tl.store(nums + draw, tl.sum(of_chunks, 0))
        place = draw * MOST + tl.sum(tl.where(chunks < chunk, of_chunks, 0), 0)
        for start in range(0, CHUNK, BLOCK):
            at = chunk * CHUNK + start + tl.arange(0, BLOCK)
            value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            kept = (at < vocab) & (_level_of(value, largest, temperature, LEVELS) < num_levels)
            to = place + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(values + to, value, mask=kept)
            tl.store(ids + to, at, mask=kept)
            place += tl.sum(kept.to(tl.int32), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """masses: float64 [S, chunks], the weights' sums.   values, ids: float32, int32 [S, MOST_CANDIDATES], of the tokens
    that top_k or top_p may keep.   nums: int32 [S], how many they are; 0 if they are too many.
    Of greedy rows nothing is written, and of rows without these filters only `masses`, if no row has one.
    """

    masses: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    nums: torch.Tensor


def find_candidates(
    logits: torch.Tensor, best_values: torch.Tensor, columns: tuple[torch.Tensor, ...], has_filters: bool
) -> Candidates:
    """Survey the rows of `logits`, float32 [S, V].

    best_values: float32 [S], their largest.   columns: of the DrawParams, on the device.   has_filters: whether a row
    has top_k or top_p.
    """
    draws, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)
    temperatures, top_ks, top_ps, min_ps = columns[:4]
    empty = partial(torch.empty, device=logits.device)
    masses = empty((draws, num_chunks), dtype=torch.float64)
    counts = empty((draws, num_chunks, _LEVELS), dtype=torch.int32)
    grid = draws, num_chunks
    rows = logits, logits.stride(0), vocab, best_values, temperatures
    _survey[grid](*rows, top_ks, top_ps, min_ps, masses, counts, CHUNK, _BLOCK, _LEVELS, num_warps=4)
    values, ids = (empty((draws, MOST_CANDIDATES), dtype=dtype) for dtype in (torch.float32, torch.int32))
    nums = empty(draws, dtype=torch.int32)
    if has_filters:
        chunks = triton.next_power_of_2(num_chunks)
        _gather[grid](
            *rows, counts, values, ids, nums, CHUNK, _BLOCK, _LEVELS, MOST_CANDIDATES, chunks, num_warps=4
        )  # fmt: skip
    return Candidates(masses, values, ids, nums)
