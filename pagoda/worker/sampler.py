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
from pagoda.kernels.sampling.reference import uniforms
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.batch_constraints import batch_constraints
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.grammar_rows import GrammarMasks

_NO_DRAWS = np.empty(0, np.int64)


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

    def sample(
        self,
        logits: torch.Tensor,
        table: DeviceTable,
        rows: np.ndarray,
        positions: np.ndarray,
        masks: GrammarMasks | None = None,
    ) -> Sampled:
        """Sample one token per draw.

        logits: float32 [n, V], may be modified.   rows: int32 [n], table rows (repeated when verifying drafts).
        positions: int32 [n], index of the token to sample; all earlier tokens are in table.token_ids.
        masks: of the draws whose rows have a grammar.
        """
        if masks is not None:
            self._ops.mask_logits(logits, masks.draws, masks.bits)
        wants_logprobs = table.num_logprobs[rows] >= 0
        any_logprobs = bool(wants_logprobs.any())
        constrained = np.flatnonzero(table.constrained[rows])
        reported = constrained[wants_logprobs[constrained]] if any_logprobs else _NO_DRAWS
        originals = logits[torch.from_numpy(reported).to(logits.device)] if reported.size else None
        raw = logits
        if constrained.size:
            constraints = batch_constraints(table, constrained, rows[constrained], positions[constrained])
            self._ops.constrain(logits, constraints)
        best = self._ops.best_tokens(logits)
        finite = np.isfinite(best[0].cpu().numpy())
        if not finite.all():
            logits = torch.where(torch.from_numpy(finite).to(logits.device).unsqueeze(1), logits, 0.0)
            best = self._ops.best_tokens(logits)
        temperature = table.temperature[rows]
        if temperature.any():
            uniform = uniforms(table.seeds[rows], positions)
            params = DrawParams(temperature, table.top_k[rows], table.top_p[rows], table.min_p[rows], uniform)
            tokens = self._ops.sample(logits, params, best)
        else:
            tokens = best[1]
        chosen = tokens.cpu().numpy()
        columns = None
        if any_logprobs:
            if originals is not None:
                raw[torch.from_numpy(reported).to(raw.device)] = originals
            columns = self._some_logprobs(raw, chosen, wants_logprobs, int(table.num_logprobs[rows].max()))
            if masks is not None:
                columns.logprobs[np.isneginf(columns.logprobs)] = MASKED_LOGPROB
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
