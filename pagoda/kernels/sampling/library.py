"""Sampling over a whole batch in torch: the arithmetic of `reference.py`, without a Python step per row.

Nothing here mixes rows: every sum runs inside one row in an order fixed by the vocabulary, so a row's token does not
depend on its neighbours. What a batch pays for: all greedy, one argmax; temperature alone, one exp over the
vocabulary; top_k or top_p, a bounded `topk` instead of a sort, widened for the rows whose answer reaches past it.
"""

import numpy as np
import torch

from pagoda.kernels.sampling.batch import BatchConstraints, DrawParams, TokenLists
from pagoda.kernels.sampling.reference import without_nonfinite

_CHUNK = 128  # vocabulary entries summed at a time when looking for the token that u points at
_FIRST_CANDIDATES = 128
_WIDER_CANDIDATES = 2048


def constrain(logits: torch.Tensor, constraints: BatchConstraints) -> None:
    """See reference.constrain; gives the same bits."""
    constraints.check(*logits.shape)
    device = logits.device

    def cells(lists: TokenLists) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each id, int64, on the device of the logits."""
        rows = torch.from_numpy(constraints.rows[lists.rows])
        return rows.to(device), torch.from_numpy(lists.ids.astype(np.int64)).to(device)

    def per_id(column: np.ndarray, lists: TokenLists) -> torch.Tensor:
        return torch.from_numpy(column[lists.rows]).to(device)

    if constraints.bias.ids.size:
        at = cells(constraints.bias)
        logits[at] = logits[at] + torch.from_numpy(constraints.bias_values).to(device)
    if constraints.penalized.ids.size:
        at = cells(constraints.penalized)
        repetition, frequency, presence = (
            per_id(column, constraints.penalized)
            for column in (constraints.repetition, constraints.frequency, constraints.presence)
        )
        counts = torch.from_numpy(constraints.output_counts).to(device)
        values = logits[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = torch.where(counts > 0, values - (frequency * counts.float() + presence), values)
    for row, mask in zip(constraints.rows.tolist(), constraints.allowed, strict=True):
        if mask is not None:
            logits[row, : len(mask)].masked_fill_(~torch.from_numpy(mask).to(device), -torch.inf)
            logits[row, len(mask) :] = -torch.inf
    if constraints.forbidden.ids.size:
        logits[cells(constraints.forbidden)] = -torch.inf


def mask_logits(logits: torch.Tensor, draws: np.ndarray, bits: np.ndarray) -> None:
    """See reference.mask_logits. The bits travel to the device packed."""
    packed = torch.from_numpy(np.ascontiguousarray(bits)).to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    index = torch.from_numpy(draws).to(logits.device)
    logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)


def sample(
    logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """See reference.sample. best: (values, ids) of `logits.max(-1)`, if the caller has them already."""
    largest, tokens = logits.max(-1) if best is None else best
    random = params.temperature > 0
    if not random.any():
        return tokens
    logits, (largest, tokens) = without_nonfinite(logits, (largest, tokens))
    tokens = tokens.clone()
    filtered = random & ((params.top_k > 0) | (params.top_p < 1))
    plain = np.flatnonzero(random & ~filtered)
    if plain.size:
        index = torch.from_numpy(plain).to(logits.device)
        some = params[plain]
        weights = _weights(logits[index], largest[index], some.temperature)
        tokens[index] = _pick(_drop_small(weights, some.min_p), some.uniform)
    rows = np.flatnonzero(filtered)
    width = max(_FIRST_CANDIDATES, 2 * int(params.top_k[rows].max(initial=0)))
    while rows.size:
        index = torch.from_numpy(rows).to(logits.device)
        picked, settled = _sample_filtered(logits[index], largest[index], params[rows], width)
        tokens[index[settled]] = picked[settled]
        rows = rows[~settled.cpu().numpy()]
        width = _WIDER_CANDIDATES if width < _WIDER_CANDIDATES else logits.shape[1]
    return tokens


def process_logits(
    logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    """See reference.process_logits. best: as for `sample`. Sorts the vocabulary."""
    largest = logits.max(-1).values if best is None else best[0]
    rows = np.flatnonzero(params.temperature > 0)
    if not rows.size:
        return
    index, some = torch.from_numpy(rows).to(logits.device), params[rows]
    originals, largest = logits[index], largest[index]
    values, ids = originals.sort(dim=1, descending=True, stable=True)
    weights = _weights(values, largest, some.temperature)
    limit = torch.from_numpy(np.where(some.top_k > 0, some.top_k, logits.shape[1])).to(logits.device).unsqueeze(1)
    dropped = torch.arange(logits.shape[1], device=logits.device) >= limit
    reached = weights.masked_fill(dropped, 0.0).cumsum(1)
    dropped |= weights < _column(some.min_p, logits)
    share = _column(np.where(some.top_p < 1, some.top_p, np.inf), logits)
    dropped |= torch.nn.functional.pad(reached[:, :-1], (1, 0)) >= share * reached[:, -1:]
    values = values.double().div_(_column(some.temperature, logits)).float().masked_fill_(dropped, -torch.inf)
    processed = torch.empty_like(values).scatter_(1, ids, values)
    logits[index] = torch.where(largest.isfinite().unsqueeze(1), processed, originals)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """float64 [S, 1] on the device of `like`."""
    return torch.from_numpy(values.astype(np.float64)).to(like.device).unsqueeze(1)


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: np.ndarray) -> torch.Tensor:
    """exp((logit - largest) / temperature), float64 [S, n]."""
    shifted = logits.double()
    return shifted.sub_(largest.double().unsqueeze(1)).div_(_column(temperature, logits)).exp_()


def _drop_small(weights: torch.Tensor, min_p: np.ndarray) -> torch.Tensor:
    """Zero the weights under min_p; in place. The largest weight is exactly 1."""
    if not min_p.any():
        return weights
    return weights.masked_fill_(weights < _column(min_p, weights), 0.0)


def _chunk_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [S, n] -> (padded to whole chunks [S, C, _CHUNK], running sums of the chunks [S, C])."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _CHUNK))
    padded = padded.view(weights.shape[0], -1, _CHUNK)
    return padded, padded.sum(-1).cumsum(-1)


def _pick(weights: torch.Tensor, uniform: np.ndarray) -> torch.Tensor:
    """Index of the first entry at which the running sum exceeds u times the total, int64 [S]."""
    chunks, reached = _chunk_sums(weights)
    total = reached[:, -1:]
    target = torch.minimum(_column(uniform, weights) * total, torch.nextafter(total, torch.zeros_like(total)))
    # Chunks of weight zero at the end repeat the total; the first chunk that exceeds the target is the right one.
    chunk = torch.searchsorted(reached, target, right=True)
    before = torch.where(chunk > 0, reached.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(1, chunk.unsqueeze(2).expand(-1, 1, _CHUNK)).squeeze(1)
    running = inside.cumsum(1) + before
    offset = torch.searchsorted(running, target, right=True)
    # Rounding may leave the chunk's own running sum slightly below its share: then take its last entry with weight.
    last = _CHUNK - 1 - (inside.flip(1) > 0).to(torch.uint8).argmax(1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(offset, last)).squeeze(1)


def _ranked(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best `width` of each row in rank order (larger first, lower id among equals): values, ids [S, width].

    Which of the ids that equal the last value are included is only defined for the whole row.
    """
    if width >= logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True)
    values, ids = logits.topk(width, dim=1)
    ids, order = ids.sort(dim=1)
    values, order_by_value = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order_by_value)


def _sample_filtered(
    logits: torch.Tensor, largest: torch.Tensor, params: DrawParams, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample rows with top_k or top_p from their `width` best; return the tokens and which are settled (bool [S]).

    A row is not settled when its kept set reaches the end of the candidates, or a value equal to their last one.
    """
    vocab_size = logits.shape[1]
    values, ids = _ranked(logits, width)
    weights = _weights(values, largest, params.temperature)
    limit = torch.from_numpy(np.where(params.top_k > 0, params.top_k, vocab_size)).to(logits.device).unsqueeze(1)
    weights.masked_fill_(torch.arange(weights.shape[1], device=logits.device) >= limit, 0.0)
    num_kept = torch.clamp(limit, max=weights.shape[1])
    if (params.top_p < 1).any():
        reached = weights.cumsum(1)
        total = reached[:, -1:]
        # Without top_k, the total is that of the vocabulary, not of the candidates.
        whole = np.flatnonzero((params.top_k <= 0) & (params.top_p < 1))
        if whole.size and width < vocab_size:
            index = torch.from_numpy(whole).to(logits.device)
            full = _weights(logits[index], largest[index], params.temperature[whole])
            total = total.index_copy(0, index, _chunk_sums(full)[1][:, -1:])
        share = _column(np.where(params.top_p < 1, params.top_p, np.inf), logits)
        before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
        outside = before >= share * total
        weights.masked_fill_(outside, 0.0)
        num_kept = torch.minimum(num_kept, (~outside).sum(1, keepdim=True))
    settled = values.gather(1, num_kept - 1) > values[:, -1:]
    if width >= vocab_size:
        settled = torch.ones_like(settled)
    _drop_small(weights, params.min_p)
    by_id, order = ids.sort(dim=1)
    chosen = _pick(weights.gather(1, order), params.uniform)
    return by_id.gather(1, chosen.unsqueeze(1)).squeeze(1), settled.squeeze(1)
