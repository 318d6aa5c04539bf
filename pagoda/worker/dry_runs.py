"""DryRuns: steps of rows that are not in the table, computed before the first request."""

import numpy as np
import torch

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.inputs import build_inputs
from pagoda.worker.sampler import Sampler


class DryRuns:
    """Computes steps whose tokens are all 0.

    Rows without blocks write to the null block, which is never read.
    """

    def __init__(
        self, forward: ForwardPass, table: DeviceTable, cache: CacheEngine, device: torch.device, sampler: Sampler
    ) -> None:
        self._forward = forward
        self._table = table
        self._cache = cache
        self._device = device
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> None:
        """Compute a step up to its log-probabilities."""
        logits = self._logits(output)
        if logits is not None:
            chosen = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            self._sampler.top_logprobs(logits, chosen, 0)

    @torch.inference_mode()
    def run_tokens(self, num_tokens: int, start: int) -> None:
        """Compute a step over this many tokens of one row, all but one of them drafts, and wait for its logits."""
        row, begin, count = np.zeros(1, np.int32), np.full(1, start, np.int32), np.full(1, num_tokens, np.int32)
        drafts = {0: np.zeros(num_tokens - 1, np.int32)} if num_tokens > 1 else {}
        logits = self._logits(SchedulerOutput(0, row, begin, count, row, row, num_tokens, drafts=drafts))
        if logits is not None:
            logits[-1, -1].item()

    def _logits(self, output: SchedulerOutput) -> torch.Tensor | None:
        """Compute a step; return its logits, float32 [num_logits, V], or None if the model has none."""
        for row, start, num_new in zip(output.rows, output.start, output.num_new, strict=True):
            self._table.token_ids[row, start : start + num_new] = 0
        inputs = build_inputs(
            self._table,
            output,
            self._device,
            num_token_types=self._forward.num_token_types,
            decode_inputs=self._forward.decode_inputs,
        )
        hidden = self._forward.forward(inputs.batch, self._cache.layers)
        if not self._forward.generates:
            return None
        if not inputs.takes_all_logits:
            hidden = self._forward.select_rows(hidden, inputs.batch.logits_index)
        return self._forward.compute_logits(hidden)
