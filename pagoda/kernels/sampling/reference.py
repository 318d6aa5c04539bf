"""Sampling, one row after the other: slow, and the definition of the result of every faster version.

A row of logits gives one token:

- temperature 0: the largest logit, the lowest id among equals.
- otherwise each token has the weight exp((logit - largest) / temperature), in float64, and tokens are in *rank order*:
  larger logit first, lower id first among equals. The filters apply in turn: top_k keeps the first k; top_p keeps the
  shortest prefix whose weights reach top_p of the total (at least one token); min_p drops tokens whose weight is below
  min_p times the largest. One uniform number u in [0, 1) picks the first token, in order of id, at which the running
  sum of kept weights exceeds u times their total.

u depends only on (seed, position of the token in its sequence), so neither the batch, nor a
preemption, nor a draft that was verified at this position can change the token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.kernels.sampling.batch import BatchConstraints, DrawParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """LogprobColumns where they were computed.   token_ids, logprobs: int32, float32 [n, 1 + k].   ranks: int32 [n]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of uint64 in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Counter-based random numbers: float64 [n] in [0, 1) with 53 bits, a pure function of (seed, position).

    seeds: uint64 [n].   positions: int [n], index of the sampled token in its sequence (prompt + output).
    The seed is mixed before the position is added, so that consecutive seeds give unrelated streams.
    """
    with np.errstate(over="ignore"):  # uint64 arithmetic wraps around on purpose
        stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
        bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def constrain(logits: torch.Tensor, constraints: BatchConstraints) -> None:
    """Apply `constraints` to logits float32 [n, V] in place: row by row, token by token.

    Raises InvariantBroken for a row or id outside them.
    """
    constraints.check(*logits.shape)
    each = zip(
        constraints.rows.tolist(),
        constraints.bias.spans(),
        constraints.penalized.spans(),
        constraints.allowed,
        constraints.forbidden.spans(),
        strict=True,
    )
    for i, (row, bias, penalized, allowed, forbidden) in enumerate(each):
        own = logits[row]
        for token, value in zip(constraints.bias.ids[bias], constraints.bias_values[bias], strict=True):
            own[token] += float(value)
        repetition, frequency, presence = (
            torch.tensor(column[i], dtype=torch.float32)
            for column in (constraints.repetition, constraints.frequency, constraints.presence)
        )
        counts = constraints.output_counts[penalized]
        for token, count in zip(constraints.penalized.ids[penalized], counts, strict=True):
            own[token] = own[token] / repetition if own[token] > 0 else own[token] * repetition
            if count:
                own[token] -= frequency * int(count) + presence
        if allowed is not None:
            for token in range(len(own)):
                if token >= len(allowed) or not allowed[token]:
                    own[token] = -torch.inf
        for token in constraints.forbidden.ids[forbidden]:
            own[token] = -torch.inf


@dataclass(frozen=True, slots=True)
class TimestampRow:
    """One row of the logits.   first: id of the first timestamp; what is below is text.   forbidden: ids (from, to)."""

    row: int
    first: int
    forbidden: Sequence[tuple[int, int]]


def constrain_timestamps(logits: torch.Tensor, rows: Sequence[TimestampRow]) -> None:
    """Change logits float32 [n, V] in place: forbidden ids become -inf, and so does all text where the timestamps
    together are more likely than the most likely token of text.

    Row by row, in shapes that do not depend on the others: a row gives the same bits in any batch.
    """
    for one in rows:
        own = logits[one.row]
        for begin, end in one.forbidden:
            own[begin:end] = -torch.inf
        text, timestamps = own[: one.first], own[one.first :]
        text.masked_fill_(timestamps.double().logsumexp(0) > text.max(), -torch.inf)


def mask_logits(logits: torch.Tensor, draws: np.ndarray, bits: np.ndarray) -> None:
    """Set logits whose bit is 0 to -inf, in place.

    logits: float32 [S, V].   draws: int64 [m], different rows of it.   bits: int32 [m, ceil(V / 32)], one bit per
    token, lowest first.
    """
    for draw, mask in zip(draws.tolist(), bits, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[1]].astype(bool)
        logits[draw, torch.from_numpy(~allowed).to(logits.device)] = -torch.inf


def sample(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Return one token per row, int64 [S] on the device of `logits`.

    logits: float32 [S, V], finite or -inf (a forbidden token), at least one finite per row; not modified.
    """
    tokens = [
        _sample_row(
            logits[i].double().cpu().numpy(),
            float(params.temperature[i]),
            int(params.top_k[i]),
            float(params.top_p[i]),
            float(params.min_p[i]),
            float(params.uniform[i]),
        )
        for i in range(logits.shape[0])
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def process_logits(logits: torch.Tensor, params: DrawParams) -> None:
    """Divide rows by their temperature and set the logits of tokens that the filters drop to -inf, in place.

    logits: float32 [S, V]. Greedy rows, and those whose largest logit is not finite, stay as they are.
    """
    for i in range(logits.shape[0]):
        row, temperature = logits[i].double().cpu().numpy(), float(params.temperature[i])
        if temperature <= 0 or not np.isfinite(row.max()):
            continue
        kept, _ = _kept(row, temperature, int(params.top_k[i]), float(params.top_p[i]), float(params.min_p[i]))
        processed = np.full(len(row), -np.inf)
        processed[kept] = row[kept] / temperature
        logits[i] = torch.from_numpy(processed).float()


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> LogprobTensors:
    """Log-softmax of the chosen token and of the k best (k may be 0), with the chosen one's rank.

    logits: float32 [n, V].   chosen: int64 [n].   Which ids are reported among equals of the k-th best is not defined.
    """
    ids = chosen.unsqueeze(1)
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, ids)
    ranks = (logits > own).sum(-1) + 1
    best, best_ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return LogprobTensors(
        token_ids=torch.cat([ids, best_ids], 1).int(),
        logprobs=torch.cat([own, best], 1) - normaliser,
        ranks=ranks.int(),
    )


def without_nonfinite(
    logits: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return logits float32 [S, V] and best (see SamplingOps.best_tokens) with zeros for rows that are not finite.

    Draws of such rows fail, but the arithmetic of sampling must not meet them. The arguments themselves where all rows
    are finite. Waits for the device.
    """
    finite = best[0].isfinite()
    if bool(finite.all()):
        return logits, best
    values, ids = torch.where(finite, best[0], 0.0), torch.where(finite, best[1], 0)
    return torch.where(finite.unsqueeze(1), logits, 0.0), (values, ids)


def _sample_row(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    if temperature <= 0:
        return int(np.argmax(logits))  # numpy gives the first of equals
    kept, weights = _kept(logits, temperature, top_k, top_p, min_p)
    reached = np.cumsum(weights)
    # u < 1, but u * total may round up to the total itself.
    target = min(u * reached[-1], np.nextafter(reached[-1], 0.0))
    return int(kept[np.searchsorted(reached, target, side="right")])


def _kept(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that the filters keep, in order, and their weights."""
    weights = np.exp((logits - logits.max()) / temperature)
    kept = np.argsort(-logits, kind="stable")
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        reached = np.cumsum(weights[kept])
        before = np.concatenate([[0.0], reached[:-1]])
        kept = kept[before < top_p * reached[-1]]
    kept = np.sort(kept[weights[kept] >= min_p])
    return kept, weights[kept]
