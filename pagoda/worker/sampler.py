"""Sampler: turn the logits of a step's draws into tokens and log-probabilities.

Order: grammar masks; logit bias, penalties, allowed and forbidden tokens; then the draw (kernels/sampling). Each is one
call for the whole batch, and a row takes time only for the settings it uses. Log-probabilities are taken after the
grammar masks and before everything else; those of rows with rules for speech, after these; those of the processed
modes, after everything that chooses the token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.core.scheduler_output import MASKED_LOGPROB, LogprobColumns
from pagoda.kernels.ops import SamplingOps
from pagoda.kernels.sampling.batch import BatchConstraints, DrawParams, TokenLists
from pagoda.kernels.sampling.reference import LogprobTensors, TimestampRow, constrain_timestamps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.kernels.transfer import to_device
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.grammar_rows import GrammarMasks
from pagoda.worker.staging import StepInputs
from pagoda.worker.table_mirror import TableMirror


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A token per draw.

    tokens: int64 [n].   logprobs: one row per draw, zeros where not requested; None if no draw requested them.
    finite: bool [n], False if the logits were not finite or all tokens were forbidden (ignore the token then).
    forbidden: bool [n], True if all tokens were.
    """

    tokens: np.ndarray
    finite: np.ndarray
    forbidden: np.ndarray
    logprobs: LogprobColumns | None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Sampled, where it was computed: not on the host yet.

    best: float32 [n], the largest logit, -inf if all tokens are forbidden.
    logprobs: of the draws `reported` (int64) only; None for all.   is_masked: a grammar has forbidden tokens, or the
        log-probabilities are taken after something else that forbids some.
    """

    tokens: torch.Tensor
    best: torch.Tensor
    logprobs: LogprobTensors | None
    reported: np.ndarray | None
    is_masked: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return what `on_host` needs copies of."""
        columns = self.logprobs
        return [self.tokens, self.best] + (
            [] if columns is None else [columns.token_ids, columns.logprobs, columns.ranks]
        )

    def on_host(self, arrays: list[np.ndarray]) -> Sampled:
        """Return the result.   arrays: `tensors`, on the host."""
        tokens, best, *columns = arrays
        finite, forbidden = np.isfinite(best), np.isneginf(best)
        if not columns:
            return Sampled(tokens, finite, forbidden, None)
        found = LogprobColumns(*columns)
        if self.reported is not None:
            found = _spread(found, self.reported, tokens)
        if self.is_masked:
            found.logprobs[np.isneginf(found.logprobs)] = MASKED_LOGPROB
        return Sampled(tokens, finite, forbidden, found)


class Sampler:
    """Samples with the table's parameters. Stateless: a row's history and seed are in the table."""

    def __init__(self, ops: SamplingOps | None = None) -> None:
        self._ops = ops or TorchOps()

    def draw(
        self,
        logits: torch.Tensor,
        table: TableMirror,
        rows: np.ndarray,
        positions: np.ndarray,
        masks: GrammarMasks | None,
        params: DrawParams | None,
    ) -> Drawn:
        """Sample one token per draw, without waiting for the device.

        logits: float32 [n, V], may be modified.   rows: int32 [n], table rows (repeated when verifying drafts).
        positions: int32 [n], index of the token to sample. Where table.reads_output, all earlier tokens are in
        table.token_ids.   masks: of the draws whose rows have a grammar.   params: `draw_params` of these draws.
        """
        if masks is not None:
            self._ops.mask_logits(logits, masks.draws, masks.bits)
        wants_logprobs = table.num_logprobs[rows] >= 0
        constrained, wanted = np.flatnonzero(table.constrained[rows]), np.flatnonzero(wants_logprobs)
        kept = constrained[wants_logprobs[constrained] & ~table.logprobs_after[rows[constrained]]]
        is_some = 0 < len(wanted) < len(rows)
        index = to_device([kept, wanted], logits.device) if kept.size or is_some else None
        originals = None if index is None else logits.index_select(0, index[0])
        if constrained.size:
            constraints = batch_constraints(table, constrained, rows[constrained], positions[constrained], masks)
            self._ops.constrain(logits, constraints)
            constrain_timestamps(
                logits, timestamp_rows(table, constrained, rows[constrained], positions[constrained], logits.shape[1])
            )
        best = self._ops.best_tokens(logits)
        tokens = best[1] if params is None else self._ops.sample(logits, params, best)
        columns = None
        if wanted.size:
            chosen = tokens
            if index is not None and originals is not None:
                logits.index_copy_(0, index[0], originals)
                if is_some:
                    logits, chosen = logits.index_select(0, index[1]), tokens.index_select(0, index[1])
            self._process(logits, table, rows[wanted], params, wanted, best)
            columns = self._ops.top_logprobs(logits, chosen, int(table.num_logprobs[rows].max()))
            _report_ids(columns, logits, table, rows[wanted])
            _report_logits(columns, logits, table.reports_logits[rows[wanted]])
        is_masked = masks is not None or bool(table.logprobs_after[rows].any())
        return Drawn(tokens, best[0], columns, wanted if is_some else None, is_masked)

    def _process(
        self,
        logits: torch.Tensor,
        table: TableMirror,
        rows: np.ndarray,
        params: DrawParams | None,
        draws: np.ndarray,
        best: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Make processed logits of those of rows that report them.

        logits: of draws (int64 [n]) of table rows (int32 [n]).   params, best: of all draws of the step.
        """
        is_processed = table.logprobs_processed[rows]
        if params is None or not is_processed.any():
            return
        some = params[draws]
        greedy = np.where(is_processed, some.temperature, 0).astype(np.float32)  # others stay as they are
        (index,) = to_device([draws], logits.device)
        self._ops.process_logits(
            logits, replace(some, temperature=greedy), (best[0].index_select(0, index), best[1].index_select(0, index))
        )


def _report_ids(columns: LogprobTensors, logits: torch.Tensor, table: TableMirror, rows: np.ndarray) -> None:
    """Put the tokens that rows report in place of their most likely ones.   rows: int32 [n], of the logits."""
    for draw in np.flatnonzero(table.has_logprob_ids[rows]).tolist():
        ids = table.logprob_ids[int(rows[draw])]
        assert ids is not None
        (index,) = to_device([ids], logits.device)
        own, place = logits[draw], slice(1, 1 + len(ids))
        columns.logprobs[draw, place] = own[index] - own[columns.token_ids[draw, 0]] + columns.logprobs[draw, 0]
        columns.token_ids[draw, place] = index.int()


def _report_logits(columns: LogprobTensors, logits: torch.Tensor, is_asked: np.ndarray) -> None:
    """Put logits in place of the log-probabilities of some rows.   is_asked: bool [n], of the logits."""
    if is_asked.any():
        (index,) = to_device([np.flatnonzero(is_asked)], logits.device)
        columns.logprobs[index] = logits[index].gather(1, columns.token_ids[index].long())


def _spread(some: LogprobColumns, index: np.ndarray, tokens: np.ndarray) -> LogprobColumns:
    """Return a row per draw: those of `some` at `index`, for the others their token and zeros."""
    token_ids = np.zeros((len(tokens), some.token_ids.shape[1]), np.int32)
    token_ids[:, 0] = tokens
    logprobs = np.zeros(token_ids.shape, np.float32)
    ranks = np.zeros(len(tokens), np.int32)
    token_ids[index], logprobs[index], ranks[index] = some.token_ids, some.logprobs, some.ranks
    return LogprobColumns(token_ids, logprobs, ranks)


_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


def batch_constraints(
    table: TableMirror,
    draws: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
    masks: GrammarMasks | None = None,
) -> BatchConstraints:
    """Return what changes in the logits of the draws (int64 [m]) of constrained rows (int32 [m]).

    positions: int32 [m], of the tokens to sample. A row may occur several times, at ascending positions.
    """
    of_row = [constraints for row in rows.tolist() if (constraints := table.constraints[row]) is not None]
    assert len(of_row) == len(rows), "table.constrained disagrees with table.constraints"

    penalized, counts = _penalized(table, rows, positions)
    values = [constraints.bias for constraints in of_row if constraints.bias.size]
    num_prompt = table.num_prompt[rows]
    bits = {} if masks is None else dict(zip(masks.draws.tolist(), masks.bits, strict=True))
    forbidden = [
        constraints.forbidden(table.known_tokens(row, position), num_before, bits.get(draw))
        for constraints, draw, row, num_before, position in zip(
            of_row,
            draws.tolist(),
            rows.tolist(),
            num_prompt.tolist(),
            positions.tolist(),
            strict=True,
        )
    ]
    num_output = (positions - num_prompt).tolist()
    return BatchConstraints(
        rows=draws,
        bias=TokenLists.of([constraints.bias_ids for constraints in of_row]),
        bias_values=np.concatenate(values) if values else _NO_VALUES,
        penalized=penalized,
        output_counts=counts,
        repetition=table.repetition[rows],
        frequency=table.frequency[rows],
        presence=table.presence[rows],
        allowed=[
            one.allowed_after(count, bits.get(draw))
            for one, draw, count in zip(of_row, draws.tolist(), num_output, strict=True)
        ],
        forbidden=TokenLists.of(forbidden),
    )


def timestamp_rows(
    table: TableMirror, draws: np.ndarray, rows: np.ndarray, positions: np.ndarray, vocab_size: int
) -> list[TimestampRow]:
    """Return what the order of timestamps forbids in the draws of rows that have them; see `batch_constraints`."""
    found: list[TimestampRow] = []
    for draw, row, position in zip(draws.tolist(), rows.tolist(), positions.tolist(), strict=True):
        constraints = table.constraints[row]
        speech = constraints.speech if constraints is not None else None
        if speech is not None and speech.rules.first_timestamp is not None:
            output = table.token_ids[row, int(table.num_prompt[row]) : position]
            ranges = speech.forbidden_ranges(output, vocab_size)
            found.append(TimestampRow(draw, speech.rules.first_timestamp, ranges))
    return found


def _penalized(table: TableMirror, rows: np.ndarray, positions: np.ndarray) -> tuple[TokenLists, np.ndarray]:
    """Return the tokens that the penalties of each draw apply to, and their counts in the output (int32)."""
    ids, counts = [], []
    for row, position, num_tokens in zip(
        rows.tolist(), positions.tolist(), table.num_tokens[rows].tolist(), strict=True
    ):
        counted = table.token_counts[row]
        if counted is None:
            found, times = _NO_IDS, _NO_IDS
        else:
            found, times = counted.before(position, table.known_tokens(row, position), num_tokens)
        ids.append(found)
        counts.append(times)
    return TokenLists.of(ids), np.concatenate(counts)


_LOGITS_ROWS = 256  # prompt positions whose logits are in memory at once


def prompt_logprobs(
    inputs: StepInputs, states: torch.Tensor, table: TableMirror, forward: ForwardRunner
) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
    """Compute the log-probabilities of the next prompt token at the step's prompt positions that need them.

    states: see ForwardRunner.states_of.
    Return (row, number of pieces) of each row, and three tensors for each piece.
    """
    counts: list[tuple[int, int]] = []
    pieces: list[torch.Tensor] = []
    if not inputs.prompt_rows:
        return counts, pieces
    offset, adapters = 0, inputs.states_adapters
    following = [table.token_ids[row, first + 1 : first + count + 1] for row, first, count in inputs.prompt_rows]
    (chosen,) = to_device([np.concatenate(following).astype(np.int64)], states.device)
    for (row, _, count), of_row in zip(inputs.prompt_rows, chosen.split([len(ids) for ids in following]), strict=True):
        k = int(table.num_prompt_logprobs[row])
        spans = list(_spans(count, _LOGITS_ROWS))
        for begin, end in spans:
            piece = slice(offset + begin, offset + end)
            logits = forward.compute_logits(states[piece], None if adapters is None else adapters[piece])
            columns = forward.ops.top_logprobs(logits, of_row[begin:end], k)
            _report_logits(columns, logits, np.full(end - begin, table.reports_logits[row]))
            pieces += [columns.token_ids, columns.logprobs, columns.ranks]
        counts.append((row, len(spans)))
        offset += count
    return counts, pieces


def prompt_logprob_columns(counts: Sequence[tuple[int, int]], arrays: list[np.ndarray]) -> dict[int, LogprobColumns]:
    """Return the columns of each row of `prompt_logprobs`.   arrays: copies of its tensors."""
    found: dict[int, LogprobColumns] = {}
    at = 0
    for row, num_pieces in counts:
        columns = [np.concatenate(arrays[at + nth : at + 3 * num_pieces : 3]) for nth in range(3)]
        found[row] = LogprobColumns(*columns)
        at += 3 * num_pieces
    return found


def _spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of 0 .. count in pieces of at most `most`."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
