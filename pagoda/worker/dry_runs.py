"""DryRuns: steps of rows that are not in the table, computed before the first request."""

import numpy as np
import torch

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.inputs import StepInputs, build_inputs
from pagoda.worker.prompt_logprobs import prompt_logprobs
from pagoda.worker.sampler import Sampler


class DryRuns:
    """Computes steps without keeping their results.

    Rows without blocks write to the null block, which no sequence reads.
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
        """Apply a step's events and compute it, with all that is sampled and reported."""
        self._table.apply(output)
        inputs, hidden = self._forwarded(output)
        if not self._forward.generates:
            return

        def logits_of(begin: int, end: int) -> torch.Tensor:
            return self._forward.compute_logits(hidden[begin:end])

        logits = logits_of(0, inputs.num_logits)
        if inputs.draw_logits is not None:
            logits = logits.index_select(0, inputs.draw_logits)
        rows, positions = inputs.draw_rows, inputs.draw_positions
        self._sampler.draw(logits, self._table, rows, positions, None, inputs.draw_params)
        del logits
        prompt_logprobs(inputs, self._table, self._sampler, logits_of)

    @torch.inference_mode()
    def run_tokens(self, num_tokens: int, max_per_row: int, start: int) -> None:
        """Compute a step over this many tokens and wait for its logits.

        max_per_row: tokens, all but the first of them drafts.   start: position of each row's first token.
        """
        counts = np.diff(np.append(np.arange(0, num_tokens, max_per_row), num_tokens)).astype(np.int32)
        rows = np.arange(len(counts), dtype=np.int32)
        drafts = {row: np.zeros(count - 1, np.int32) for row, count in enumerate(counts.tolist()) if count > 1}
        begin = np.full_like(rows, start)
        output = SchedulerOutput(0, rows, begin, counts, rows, rows, num_tokens, drafts=drafts)
        self._table.token_ids[rows, start : start + int(counts[0])] = 0
        _, hidden = self._forwarded(output)
        if self._forward.generates:
            self._forward.compute_logits(hidden)[-1, -1].item()

    def _forwarded(self, output: SchedulerOutput) -> tuple[StepInputs, torch.Tensor]:
        """Compute a step's forward; return its inputs, and the hidden states that its logits are computed from."""
        inputs = build_inputs(
            self._table,
            output,
            self._device,
            num_token_types=self._forward.num_token_types,
            decode_inputs=self._forward.decode_inputs,
        )
        return inputs, inputs.run(self._forward, self._cache.layers)
