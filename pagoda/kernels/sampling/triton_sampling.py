"""Sampling in Triton: a first look at the rows of logits, and then one program per row that draws.

The first look reads a row in chunks, each by a program of its own, so that a few rows keep a whole GPU busy. Tokens are
put in levels by how far their logit is from the largest, in units of the temperature. top_k and top_p keep tokens from
the largest on, nearly always few: those of the first levels, as many levels as there is room for, are written to a
short row of candidates, in order of id.

The draw finds the kept tokens by searching for their smallest logit. Nothing is sorted. Float32 logits have an
order-preserving 32-bit key, and the kept tokens of a filter are those with a key above some cut, with the first few, in
order of id, whose key is the cut. The search reads a row's candidates where they suffice, or else the row itself, which
takes milliseconds on a GPU. Weights are in float64, as in the definition. A row's programs read that row alone.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.transfer import to_device
from pagoda.kernels.triton_support import jit

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


_BLOCK = 2048
_BEST_BLOCK = 8192
_LOWEST_KEY = tl.constexpr(-(2**31))
_LAST_ID = tl.constexpr(2**31 - 1)


@jit
def _key_of(logits):
    """Return int64 keys in the order of float32 logits."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@jit
def _amount_above(row, vocab, cut, largest, temperature, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the weights of all tokens whose key exceeds `cut`, or their number; float64."""
    amount = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        above = (at < vocab) & (_key_of(logits) > cut)
        if BY_WEIGHT:
            if tl.sum(above.to(tl.int32), 0) > 0:  # type: ignore[operator]  # the exponentials are most of the work
                amount += tl.sum(tl.where(above, weight_of(logits, largest, temperature), 0.0), 0)
        else:
            amount += tl.sum(above.to(tl.int32), 0).to(tl.float64)
    return amount


@jit
def _find_cut(row, vocab, low, high, wanted, largest, temperature, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key in low + 1 .. high above which there is less than `wanted` (see _amount_above)."""
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = _amount_above(row, vocab, middle, largest, temperature, BY_WEIGHT, BLOCK) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return high


@jit
def _kept_weights(row, vocab, start, cut, ties, seen, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Return (ids, their weights, 0 where not kept, ties seen up to their end) of a block of the vocabulary.

    Tokens with a key above `cut` are kept, and the first `ties` of those at the cut, of which `seen` came before.
    """
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(row + at, mask=at < vocab, other=float("-inf"))
    key = _key_of(logits)
    is_tie = ((key == cut) & (at < vocab)).to(tl.int64)
    rank = seen + tl.cumsum(is_tie, 0) - is_tie
    weights = weight_of(logits, largest, temperature)
    kept = (at < vocab) & ((key > cut) | ((is_tie > 0) & (rank < ties))) & (weights >= min_p)
    return at, tl.where(kept, weights, 0.0), seen + tl.sum(is_tie, 0)


@jit
def _first_past(row, start, end, cut, ties, largest, temperature, min_p, target, reached, BLOCK: tl.constexpr):
    """Return the place of the first kept token at which the running sum of weights exceeds `target`.

    reached: the sum before `start`.   -1 if no token is kept.
    """
    seen = tl.full([], 0, tl.int64)
    token = tl.full([], -1, tl.int32)
    is_found = start >= end
    while (start < end) & (is_found == 0):
        at, weights, seen = _kept_weights(row, end, start, cut, ties, seen, largest, temperature, min_p, BLOCK)
        is_past = (reached + tl.cumsum(weights, 0) > target) & (weights > 0)
        first = tl.min(tl.where(is_past, at, _LAST_ID), 0)
        last = tl.max(tl.where(weights > 0, at, -1), 0)
        is_found = first < _LAST_ID
        # Rounding may leave the sum slightly below the target to the end: then it is the last kept token.
        token = tl.where(is_found, first, tl.where(last >= 0, last, token))  # type: ignore[operator]
        reached += tl.sum(weights, 0)
        start += BLOCK
    return token


@jit
def _target_of(uniform, total):
    return tl.minimum(uniform * total, total * (1.0 - 1.1102230246251565e-16))


@jit
def _pick(row, size, cut, ties, largest, temperature, min_p, uniform, BLOCK: tl.constexpr):
    """Return the place of the first kept token at which the running sum of weights exceeds `uniform` of their total."""
    total = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, size, BLOCK):
        _, weights, seen = _kept_weights(row, size, start, cut, ties, seen, largest, temperature, min_p, BLOCK)
        total += tl.sum(weights, 0)
    target = _target_of(uniform, total)
    nothing = tl.full([], 0.0, tl.float64)
    start = tl.full([], 0, tl.int32)
    return _first_past(row, start, size, cut, ties, largest, temperature, min_p, target, nothing, BLOCK)


@jit
def _pick_by_chunk(
    row, vocab, masses, num_chunks, largest, temperature, min_p, uniform,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same of a whole row of which min_p alone drops tokens; only the chunk with the token is read.

    masses: the sums of the kept weights of its chunks.
    """
    chunks = tl.arange(0, CHUNKS)
    mass = tl.load(masses + chunks, mask=chunks < num_chunks, other=0.0)
    target = _target_of(uniform, tl.sum(mass, 0))
    first = tl.min(tl.where((tl.cumsum(mass, 0) > target) & (mass > 0), chunks, CHUNKS), 0)
    last = tl.max(tl.where(mass > 0, chunks, 0), 0)
    chunk = tl.minimum(first, last)
    reached = tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)
    end = tl.minimum(vocab, (chunk + 1) * CHUNK)
    no_cut, no_ties = tl.full([], _LOWEST_KEY, tl.int64), tl.full([], 0, tl.int64)
    return _first_past(
        row, chunk * CHUNK, end, no_cut, no_ties, largest, temperature, min_p, target, reached, BLOCK
    )  # fmt: skip


@jit
def _sample(
    logits, stride, vocab, best_values, best_ids, masses, values, ids, nums, num_chunks,
    temperatures, top_ks, top_ps, min_ps, uniforms, tokens,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(0).to(tl.int64)
    row = logits + draw * stride
    token = tl.load(best_ids + draw).to(tl.int32)
    temperature = tl.load(temperatures + draw).to(tl.float64)
    if temperature > 0:
        best = tl.load(best_values + draw)
        largest = best.to(tl.float64)
        highest = _key_of(best)
        top_k = tl.load(top_ks + draw)
        top_p = tl.load(top_ps + draw).to(tl.float64)
        min_p = tl.load(min_ps + draw).to(tl.float64)
        uniform = tl.load(uniforms + draw)
        masses += draw * num_chunks
        place = tl.full([], -1, tl.int32)
        if is_filtered(top_k, top_p, vocab):
            cut = tl.full([], _LOWEST_KEY, tl.int64)
            ties = tl.full([], 0, tl.int64)
            has_top_k = (top_k > 0) & (top_k < vocab)
            chunks = tl.arange(0, CHUNKS)
            total = tl.sum(tl.load(masses + chunks, mask=chunks < num_chunks, other=0.0), 0)
            num, few = tl.load(nums + draw), values + draw * MOST
            suffices = num >= top_k
            if has_top_k == 0:
                suffices = _amount_above(few, num, cut, largest, temperature, True, BLOCK) >= top_p * total
            row = tl.where(suffices, few, row)
            size = tl.where(suffices, num, vocab)
            if has_top_k:
                wanted = top_k.to(tl.float64)
                cut = _find_cut(row, size, cut, highest, wanted, largest, temperature, False, BLOCK)
                ties = top_k - _amount_above(row, size, cut, largest, temperature, False, BLOCK).to(tl.int64)
            if top_p < 1:
                if has_top_k:
                    total = _amount_above(row, size, cut, largest, temperature, True, BLOCK)
                    total += tl.where(ties > 0, ties.to(tl.float64) * _weight_at(cut, largest, temperature), 0.0)
                wanted = top_p * total
                old_cut, old_ties = cut, ties
                cut = _find_cut(row, size, cut - 1, highest, wanted, largest, temperature, True, BLOCK)
                above = _amount_above(row, size, cut, largest, temperature, True, BLOCK)
                ties = tl.ceil((wanted - above) / _weight_at(cut, largest, temperature)).to(tl.int64)
                ties = tl.where(cut == old_cut, tl.minimum(ties, old_ties), ties)
            place = _pick(row, size, cut, ties, largest, temperature, min_p, uniform, BLOCK)
            place = tl.load(ids + draw * MOST + place, mask=suffices & (place >= 0), other=place)
        else:
            place = _pick_by_chunk(
                row, vocab, masses, num_chunks, largest, temperature, min_p, uniform, CHUNK, CHUNKS, BLOCK
            )  # fmt: skip
        token = tl.where(place >= 0, place, token)
    tl.store(tokens + draw, token.to(tl.int64))


@jit
def _weight_at(key, largest, temperature):
    """Return the weight of the tokens with this key."""
    bits = key.to(tl.int32)
    logit = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return weight_of(logit, largest, temperature)


@jit
def _best_tokens(logits, stride, vocab, values, ids, BLOCK: tl.constexpr):
    """Each place of a block keeps its own best until the end, so that nothing but loads is waited for."""
    draw = tl.program_id(0).to(tl.int64)
    row = logits + draw * stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        nan = tl.where(value == value, nan, value)
        is_better = value > best
        best_ids = tl.where(is_better, at, best_ids)
        best = tl.where(is_better, value, best)
    largest = tl.max(best, 0)
    first = tl.min(tl.where(best == largest, best_ids, _LAST_ID), 0)
    tl.store(values + draw, largest + tl.sum(nan, 0))  # type: ignore[operator]
    tl.store(ids + draw, first.to(tl.int64))  # type: ignore[union-attr]


@jit
def _mask_logits(logits, stride, vocab, draws, bits, num_words, BLOCK: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + mask * num_words + at // 32, mask=at < vocab, other=0)
    is_forbidden = ((word >> (at % 32)) & 1) == 0
    target = logits + tl.load(draws + mask) * stride + at
    tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=(at < vocab) & is_forbidden)


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See SamplingOps.best_tokens; of equals the lowest id."""
    draws, vocab = logits.shape
    values = torch.empty(draws, dtype=torch.float32, device=logits.device)
    ids = torch.empty(draws, dtype=torch.int64, device=logits.device)
    if draws:
        _best_tokens[(draws,)](logits, logits.stride(0), vocab, values, ids, _BEST_BLOCK, num_warps=16)
    return values, ids


def sample(
    logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """See reference.sample. best: what `best_tokens` gave for these logits."""
    best_values, best_ids = best_tokens(logits) if best is None else best
    if not (params.temperature > 0).any():
        return best_ids
    draws, vocab = logits.shape
    columns = params.on_device or tuple(to_device(params.columns, logits.device))
    has_filters = bool((((params.top_k > 0) & (params.top_k < vocab)) | (params.top_p < 1)).any())
    found = find_candidates(logits, best_values, columns, has_filters)
    tokens = torch.empty(draws, dtype=torch.int64, device=logits.device)
    num_chunks = found.masses.shape[1]
    _sample[(draws,)](
        logits, logits.stride(0), vocab, best_values, best_ids, found.masses, found.values, found.ids, found.nums,
        num_chunks, *columns, tokens, CHUNK, triton.next_power_of_2(num_chunks), MOST_CANDIDATES, _BLOCK, num_warps=16,
    )  # fmt: skip
    return tokens


def mask_logits(logits: torch.Tensor, draws: np.ndarray, bits: np.ndarray) -> None:
    """See reference.mask_logits."""
    arrays = [np.ascontiguousarray(draws, np.int64), np.ascontiguousarray(bits, np.int32)]
    mask_rows(logits, *to_device(arrays, logits.device))


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """As `mask_logits`, with the rows (int64 [m]) and their masks (int32 [m, num_words]) on the device."""
    vocab, (num_rows, num_words) = logits.shape[1], words.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab, _BLOCK))
        _mask_logits[grid](logits, logits.stride(0), vocab, rows, words, num_words, _BLOCK, num_warps=4)
