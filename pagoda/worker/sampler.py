"""Sampler: turn the logits of a step's draws into tokens and log-probabilities.

Rows only pay for features they use. Order: logit bias, penalties, forbidden and allowed tokens; then kernels/sampling.
Log-probabilities are the model's own, before any of this.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pagoda.core.scheduler_output import LogprobColumns
from pagoda.kernels.ops import SamplingOps
from pagoda.kernels.sampling.reference import uniforms
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.device_table import DeviceTable


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A token per draw.

    tokens: int64 [n].   logprobs: one row per draw, zeros where not requested; None if no draw requested them.
    finite: bool [n], False if the logits were not finite or all tokens were forbidden (ignore the token then).
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprobs: LogprobColumns | None


class Sampler:
    """Samples with the table's parameters. Stateless: a row's history and seed are in the table."""

    def __init__(self, ops: SamplingOps | None = None) -> None:
        self._ops = ops or TorchOps()

    def sample(self, logits: torch.Tensor, table: DeviceTable, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Sample one token per draw.

        logits: float32 [n, V], may be modified.   rows: int32 [n], table rows (repeated when verifying drafts).
        positions: int32 [n], index of the token to sample; all earlier tokens are in table.token_ids.
        """
        wants_logprobs = table.num_logprobs[rows] >= 0
        any_logprobs = bool(wants_logprobs.any())
        constrained = np.flatnonzero(table.constrained[rows])
        raw = logits
        if constrained.size:
            logits = logits.clone() if any_logprobs else logits
            apply_constraints(logits, table, constrained, rows[constrained], positions[constrained])
        best = self._ops.best_tokens(logits)
        finite = np.isfinite(best[0].cpu().numpy())
        if not finite.all():
            logits = torch.where(torch.from_numpy(finite).to(logits.device).unsqueeze(1), logits, 0.0)
            best = self._ops.best_tokens(logits)
        temperature = table.temperature[rows]
        if temperature.any():
            uniform = uniforms(table.seeds[rows], positions)
            tokens = self._ops.sample(
                logits, temperature, table.top_k[rows], table.top_p[rows], table.min_p[rows], uniform, best
            )
        else:
            tokens = best[1]
        chosen = tokens.cpu().numpy()
        columns = None
        if any_logprobs:
            columns = self._some_logprobs(raw, chosen, wants_logprobs, int(table.num_logprobs[rows].max()))
        return Sampled(chosen, finite, columns)

    def top_logprobs(self, logits: torch.Tensor, chosen: np.ndarray, k: int) -> LogprobColumns:
        """See SamplingOps.top_logprobs."""
        return self._ops.top_logprobs(logits, chosen, k)

    def _some_logprobs(self, logits: torch.Tensor, chosen: np.ndarray, wanted: np.ndarray, k: int) -> LogprobColumns:
        """Return a row per draw, computed only for the wanted draws."""
        if wanted.all():
            return self.top_logprobs(logits, chosen, k)
        index = np.flatnonzero(wanted)
        some = self.top_logprobs(logits[torch.from_numpy(index).to(logits.device)], chosen[index], k)
        token_ids = np.zeros((len(chosen), 1 + k), np.int32)
        token_ids[:, 0] = chosen
        logprobs = np.zeros((len(chosen), 1 + k), np.float32)
        ranks = np.zeros(len(chosen), np.int32)
        token_ids[index], logprobs[index], ranks[index] = some.token_ids, some.logprobs, some.ranks
        return LogprobColumns(token_ids, logprobs, ranks)


def apply_constraints(
    logits: torch.Tensor, table: DeviceTable, draws: np.ndarray, rows: np.ndarray, positions: np.ndarray
) -> None:
    """Modify logits [n, V] in place for the draws (int64 [m]) whose rows (int32 [m]) have constraints."""
    of_row = [table.constraints[row] for row in rows.tolist()]
    cells: list[tuple[int, np.ndarray, np.ndarray]] = []
    for draw, limits in zip(draws.tolist(), of_row, strict=True):
        if limits is not None and limits.bias_ids.size:
            cells.append((draw, limits.bias_ids, limits.bias))
    if cells:
        at, ids, values = _cells(cells, logits.device)
        logits.index_put_((at, ids), values, accumulate=True)
    penalised = np.array([limits is not None and limits.has_penalty for limits in of_row])
    if penalised.any():
        _apply_penalties(logits, table, draws[penalised], rows[penalised], positions[penalised])
    cells = []
    for draw, row, position, limits in zip(draws.tolist(), rows.tolist(), positions.tolist(), of_row, strict=True):
        if limits is None:
            continue
        if limits.allowed is not None:
            allowed = torch.from_numpy(limits.allowed).to(logits.device)
            own = logits[draw]
            kept = own.index_select(0, allowed)
            own.fill_(-torch.inf).index_copy_(0, allowed, kept)
        forbidden = limits.forbidden(table.token_ids[row, table.num_prompt[row] : position])
        if forbidden.size:
            cells.append((draw, forbidden, np.full(forbidden.size, -np.inf, np.float32)))
    if cells:
        at, ids, values = _cells(cells, logits.device)
        logits.index_put_((at, ids), values)


def _cells(
    cells: list[tuple[int, np.ndarray, np.ndarray]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (row, ids, values) records as three flat tensors."""
    at = np.repeat(np.array([row for row, _, _ in cells], np.int64), [len(ids) for _, ids, _ in cells])
    ids = np.concatenate([ids for _, ids, _ in cells], dtype=np.int64)
    values = np.concatenate([values for _, _, values in cells])
    return torch.from_numpy(at).to(device), torch.from_numpy(ids).to(device), torch.from_numpy(values).to(device)


def _apply_penalties(
    logits: torch.Tensor, table: DeviceTable, draws: np.ndarray, rows: np.ndarray, positions: np.ndarray
) -> None:
    """Apply the repetition penalty (prompt and output), then frequency and presence penalties (output only).

    They are computed from the token history, so there is no state to restore after a preemption or rejected draft.
    """
    penalised = zip(draws.tolist(), rows.tolist(), positions.tolist(), strict=True)
    seen: list[tuple[int, np.ndarray, np.ndarray]] = []
    shifts: list[tuple[int, np.ndarray, np.ndarray]] = []
    for draw, row, position in penalised:
        repetition, frequency, presence = table.repetition[row], table.frequency[row], table.presence[row]
        if repetition != 1:
            history = table.token_ids[row, :position]
            seen.append((draw, history, np.broadcast_to(repetition, history.shape)))
        if frequency or presence:
            used, counts = np.unique(table.token_ids[row, table.num_prompt[row] : position], return_counts=True)
            shifts.append((draw, used, frequency * counts.astype(np.float32) + presence))
    if seen:
        # A repeated token is read and written several times, with the same value: cheaper than sorting.
        at, ids, repetitions = _cells(seen, logits.device)
        values = logits[at, ids]
        logits[at, ids] = torch.where(values > 0, values / repetitions, values * repetitions)
    if shifts:
        at, ids, amounts = _cells(shifts, logits.device)
        logits[at, ids] -= amounts
