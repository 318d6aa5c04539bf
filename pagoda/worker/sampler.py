"""Sampler: turn the logits of a step's draws into tokens and log-probabilities.

Order: grammar masks; logit bias, penalties, allowed and forbidden tokens (kernels/constraints); then kernels/sampling.
Each is one call for the whole batch, and a row only pays for what it uses. Log-probabilities are taken
after the grammar masks and before everything else.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pagoda.core.grammar import MASKED_LOGPROB
from pagoda.core.scheduler_output import LogprobColumns
from pagoda.kernels.ops import SamplingOps
from pagoda.kernels.sampling.draw_params import DrawParams
from pagoda.kernels.sampling.logprobs import LogprobTensors
from pagoda.kernels.torch_ops import TorchOps
from pagoda.kernels.transfer import to_device
from pagoda.worker.batch_constraints import batch_constraints
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.grammar_rows import GrammarMasks


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A token per draw.

    tokens: int64 [n].   logprobs: one row per draw, zeros where not requested; None if no draw requested them.
    finite: bool [n], False if the logits were not finite or all tokens were forbidden (ignore the token then).
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprobs: LogprobColumns | None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Sampled, where it was computed: not on the host yet.

    logprobs: of the draws `reported` (int64) only; None for all.   is_masked: a grammar has forbidden tokens.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    logprobs: LogprobTensors | None
    reported: np.ndarray | None
    is_masked: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return what `on_host` needs copies of."""
        columns = self.logprobs
        return [self.tokens, self.finite] + (
            [] if columns is None else [columns.token_ids, columns.logprobs, columns.ranks]
        )

    def on_host(self, arrays: list[np.ndarray]) -> Sampled:
        """Return the result.   arrays: `tensors`, on the host."""
        tokens, finite, *columns = arrays
        if not columns:
            return Sampled(tokens, finite, None)
        found = LogprobColumns(*columns)
        if self.reported is not None:
            found = _spread(found, self.reported, tokens)
        if self.is_masked:
            found.logprobs[np.isneginf(found.logprobs)] = MASKED_LOGPROB
        return Sampled(tokens, finite, found)


class Sampler:
    """Samples with the table's parameters. Stateless: a row's history and seed are in the table."""

    def __init__(self, ops: SamplingOps | None = None) -> None:
        self._ops = ops or TorchOps()

    def draw(
        self,
        logits: torch.Tensor,
        table: DeviceTable,
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
        kept = constrained[wants_logprobs[constrained]]
        is_some = 0 < len(wanted) < len(rows)
        index = to_device([kept, wanted], logits.device) if kept.size or is_some else None
        originals = None if index is None else logits.index_select(0, index[0])
        if constrained.size:
            constraints = batch_constraints(table, constrained, rows[constrained], positions[constrained])
            self._ops.constrain(logits, constraints)
        best = self._ops.best_tokens(logits)
        tokens = best[1] if params is None else self._ops.sample(logits, params, best)
        columns = None
        if wanted.size:
            chosen = tokens
            if index is not None and originals is not None:
                logits.index_copy_(0, index[0], originals)
                if is_some:
                    logits, chosen = logits.index_select(0, index[1]), tokens.index_select(0, index[1])
            columns = self.top_logprobs(logits, chosen, int(table.num_logprobs[rows].max()))
        return Drawn(tokens, best[0].isfinite(), columns, wanted if is_some else None, masks is not None)

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> LogprobTensors:
        """See SamplingOps.top_logprobs."""
        return self._ops.top_logprobs(logits, chosen, k)


def _spread(some: LogprobColumns, index: np.ndarray, tokens: np.ndarray) -> LogprobColumns:
    """Return a row per draw: those of `some` at `index`, for the others their token and zeros."""
    token_ids = np.zeros((len(tokens), some.token_ids.shape[1]), np.int32)
    token_ids[:, 0] = tokens
    logprobs = np.zeros(token_ids.shape, np.float32)
    ranks = np.zeros(len(tokens), np.int32)
    token_ids[index], logprobs[index], ranks[index] = some.token_ids, some.logprobs, some.ranks
    return LogprobColumns(token_ids, logprobs, ranks)
