"""ModelRunner: one SchedulerOutput in, one ModelRunnerOutput out."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.pooling import PoolingPlan
from pagoda.core.scheduler_output import LogprobColumns, ModelRunnerOutput, SchedulerOutput
from pagoda.worker.adapters import Adapters
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.grammar_rows import GrammarMasks, GrammarRows
from pagoda.worker.inputs import StepInputs, build_inputs
from pagoda.worker.pooler import Pooler
from pagoda.worker.prompt_embeds import PromptEmbeds
from pagoda.worker.sampler import Sampled, Sampler
from pagoda.worker.speculation.speculator import NEVER_DRAFTS, Speculator
from pagoda.worker.step_times import StepTimes

logger = logging.getLogger("pagoda")

_NO_TOKENS = np.empty((0, 1), np.int32)
_NO_COUNTS = np.empty(0, np.int32)
_NOT_FINITE = "the model's logits are not finite, or all tokens are forbidden"
_PROMPT_LOGITS_ROWS = 256  # prompt positions whose logits are in memory at once


class ModelRunner:
    """Executes steps one after the other. Its only state is the table and the KV pools."""

    def __init__(
        self,
        forward: ForwardPass,
        table: DeviceTable,
        cache: CacheEngine,
        device: torch.device,
        sampler: Sampler | None = None,
        speculator: Speculator | None = None,
        grammars: GrammarRows | None = None,
        adapters: Adapters | None = None,
        pooling: PoolingPlan | None = None,
        embeds: PromptEmbeds | None = None,
    ) -> None:
        """speculator: proposes drafts after each step; None if nothing drafts.

        grammars: None if no request may have a grammar.   adapters: None if no request may have a LoRA adapter.
        pooling: in place of the model's own.   embeds: None if no prompt may be given as embeddings.
        """
        self._forward = forward
        self._table = table
        self._cache = cache
        self._device = device
        self._sampler = sampler or Sampler()
        self._speculator = speculator
        self._grammars = grammars
        self._adapters = adapters
        self._pooler = Pooler(forward, pooling)
        self._embeds = embeds
        self.times = StepTimes()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a forward pass of one token, writing to the null block, which is never read.

        If the kernels do not support this model and these settings, this fails at startup instead of in every request.
        """
        nothing_yet = np.zeros(1, np.int32)
        one = np.ones(1, np.int32)
        self.dry_run(SchedulerOutput(0, nothing_yet, nothing_yet, one, nothing_yet, nothing_yet, 1))

    @torch.inference_mode()
    def dry_run(self, output: SchedulerOutput) -> None:
        """Compute a step, up to its logits, of rows that are not in the table: all of their tokens are 0."""
        for row, start, num_new in zip(output.rows, output.start, output.num_new, strict=True):
            self._table.token_ids[row, start : start + num_new] = 0
        inputs = build_inputs(self._table, output, self._device, num_token_types=self._forward.num_token_types)
        hidden = self._forward.forward(inputs.batch, self._cache.layers)
        if self._forward.generates:
            if not inputs.takes_all_logits:
                hidden = self._forward.select_rows(hidden, inputs.batch.logits_index)
            self._forward.compute_logits(hidden)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the step's events, then compute its rows. Results are on the host when it returns.

        A row whose logits are not finite is reported in `failed` and gets no token; other rows are not affected.
        """
        begin_s = time.perf_counter()
        self.times.begin()
        if self._speculator is not None:
            self._speculator.begin_step()
        swap_s = self._apply(output)
        self.times.lap("events")
        if output.is_empty:
            duration_s = time.perf_counter() - begin_s
            return ModelRunnerOutput(output.step, _NO_TOKENS, _NO_COUNTS, duration_s=duration_s, swap_s=swap_s)
        slots = self._adapters.slots_of(output.rows) if self._adapters is not None else None
        embeds = self._embeds.take(output) if self._embeds is not None else None
        inputs = build_inputs(
            self._table, output, self._device, slots, self._pooler.kind, self._forward.num_token_types, embeds
        )
        masks: Future[GrammarMasks] | None = None
        if self._grammars is not None:  # filled while the forward runs
            masks = self._grammars.begin(self._table, inputs.draw_rows, inputs.draw_positions)
        self.times.lap("inputs")
        hidden = self._forward.forward(inputs.batch, self._cache.layers)
        self.times.lap("forward")
        if not inputs.takes_all_logits:
            hidden = self._forward.select_rows(hidden, inputs.batch.logits_index)
        sampled, num_sampled, logprobs, failed = self._sample(inputs, output, hidden, masks)
        self.times.lap("sampling")
        if self._adapters is not None:
            failed |= self._adapters.failed(output.rows)
        prompt_logprobs = self._prompt_logprobs(inputs, hidden)
        pooled: dict[int, np.ndarray] = {}
        if inputs.pooled:
            first = hidden.shape[0] - sum(chunk.count for chunk in inputs.pooled)
            pooled, without_result = self._pooler.run(inputs.pooled, self._table.pooling, hidden[first:], slots)
            failed |= without_result
        drafts: dict[int, np.ndarray] = {}
        if self._speculator is not None:
            drafts = self._draft(self._speculator, output, num_sampled, failed)
            self.times.lap("drafting")
        no_drafts_until = self._speculator.no_drafts_until if self._speculator is not None else NEVER_DRAFTS
        return ModelRunnerOutput(
            step=output.step,
            sampled=sampled,
            num_sampled=num_sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            failed=failed,
            refused=masks.result().refused if masks is not None else frozenset(),
            duration_s=time.perf_counter() - begin_s,
            swap_s=swap_s,
            drafts=drafts,
            no_drafts_until=no_drafts_until,
        )

    def _draft(
        self, speculator: Speculator, output: SchedulerOutput, num_sampled: np.ndarray, failed: dict[int, str]
    ) -> dict[int, np.ndarray]:
        """Return drafts for the next step. The step's tokens are committed: an error must cost no more than drafts."""
        try:
            drafts = speculator.finish_step(output, self._table, num_sampled, failed)
            if self._grammars is not None and drafts:
                drafts = self._grammars.allowed_drafts(self._table, drafts)
        except Exception:
            logger.exception("drafting failed; this worker continues without speculation")
            self._speculator = None
            return {}
        return drafts

    def _apply(self, output: SchedulerOutput) -> float:
        """Apply the step's events; return the seconds its swaps took. A partial apply corrupts the table: fatal."""
        try:
            swap_s = self._cache.apply(output)
            if self._speculator is not None:
                self._speculator.apply(output, self._table)
            if self._grammars is not None:
                self._grammars.apply(output)
            if self._adapters is not None:
                self._adapters.apply(output)
            self._pooler.apply(output)
            if self._embeds is not None:
                self._embeds.apply(output)
            self._table.apply(output)
        except Exception as error:
            raise WorkerDied(f"step {output.step} could not be applied: {type(error).__name__}: {error}") from error
        return swap_s

    def _sample(
        self,
        inputs: StepInputs,
        output: SchedulerOutput,
        hidden: torch.Tensor,
        pending_masks: "Future[GrammarMasks] | None",
    ) -> tuple[np.ndarray, np.ndarray, LogprobColumns | None, dict[int, str]]:
        """Sample the step's draws and commit them to the table; return (sampled, num_sampled, logprobs, failed)."""
        if not inputs.draw_rows.size:
            return _NO_TOKENS, _NO_COUNTS, None, {}
        logits = self._logits(inputs, hidden, 0, inputs.num_logits)
        self.times.lap("lm_head")
        if inputs.draw_logits is not None:
            logits = logits[torch.from_numpy(inputs.draw_logits).to(logits.device)]
        masks = None
        if pending_masks is not None:
            masks = pending_masks.result()
            self.times.lap("masks")
        drawn = self._sampler.sample(logits, self._table, inputs.draw_rows, inputs.draw_positions, masks)
        if masks is not None and masks.failed:
            drawn.finite[np.isin(inputs.draw_rows, list(masks.failed))] = False
        accepted = accepted_draws(inputs, drawn, output)
        rows, positions = inputs.draw_rows[accepted], inputs.draw_positions[accepted]
        self._table.commit(rows, positions, drawn.tokens[accepted])
        failed: dict[int, str] = {}
        if not drawn.finite.all():
            first = np.cumsum(inputs.num_draws) - inputs.num_draws
            failed = dict.fromkeys(inputs.draw_rows[first[~drawn.finite[first]]].tolist(), _NOT_FINITE)
            if masks is not None:
                failed |= masks.failed
        sampled, num_sampled = _by_sample(inputs.num_draws, drawn.tokens, accepted)
        logprobs = drawn.logprobs
        if logprobs is not None and not accepted.all():
            logprobs = LogprobColumns(
                logprobs.token_ids[accepted], logprobs.logprobs[accepted], logprobs.ranks[accepted]
            )
        return sampled, num_sampled, logprobs, failed

    def _logits(self, inputs: StepInputs, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the logits of rows begin .. end - 1 of `hidden`, which has a row for each of `logits_index`."""
        adapters = inputs.logits_adapters
        if adapters is None:
            return self._forward.compute_logits(hidden[begin:end])
        return self._forward.compute_logits(hidden[begin:end], adapters[begin:end])

    def shutdown(self) -> None:
        """End the thread that fills masks. Idempotent."""
        if self._grammars is not None:
            self._grammars.shutdown()

    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[int, LogprobColumns]:
        """Return, per row, the log-probabilities of the next prompt token at the positions computed in this step."""
        found: dict[int, LogprobColumns] = {}
        offset = inputs.num_logits
        for row, first, count in inputs.prompt_rows:
            k = int(self._table.num_prompt_logprobs[row])
            parts = []
            for begin, end in _spans(count, _PROMPT_LOGITS_ROWS):
                logits = self._logits(inputs, hidden, offset + begin, offset + end)
                following = self._table.token_ids[row, first + begin + 1 : first + end + 1]
                parts.append(self._sampler.top_logprobs(logits, following, k))
            found[row] = LogprobColumns(
                np.concatenate([part.token_ids for part in parts]),
                np.concatenate([part.logprobs for part in parts]),
                np.concatenate([part.ranks for part in parts]),
            )
            offset += count
        return found


def accepted_draws(inputs: StepInputs, drawn: Sampled, output: SchedulerOutput) -> np.ndarray:
    """Return which draws are accepted: bool [num_draws].

    In a row with drafts: the draws up to and including the first that differs from the draft at its position. A draw's
    random number depends on its position only, so these are the tokens that single steps would have sampled. A draw
    that is not finite ends them: its row only fails if it gets there without drafts, in a later step.
    """
    is_accepted = drawn.finite.copy()
    if not output.drafts:
        return is_accepted
    begins = np.cumsum(inputs.num_draws) - inputs.num_draws
    for j in np.flatnonzero(inputs.num_draws > 1).tolist():
        begin, count = int(begins[j]), int(inputs.num_draws[j])
        drafts = output.drafts[int(output.rows[output.sample_index[j]])]
        agree = drawn.tokens[begin : begin + count - 1] == drafts
        is_accepted[begin + 1 : begin + count] &= np.cumprod(agree).astype(bool)
        is_accepted[begin : begin + count] = np.cumprod(is_accepted[begin : begin + count]).astype(bool)
    return is_accepted


def _by_sample(num_draws: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the accepted tokens (int32 [num_samples, most draws], padded with -1) and their counts (int32)."""
    if num_draws.max() == 1:
        return np.where(accepted, tokens, -1).astype(np.int32)[:, None], accepted.astype(np.int32)
    sampled = np.full((len(num_draws), int(num_draws.max())), -1, np.int32)
    sample = np.repeat(np.arange(len(num_draws)), num_draws)
    column = np.arange(len(tokens)) - np.repeat(np.cumsum(num_draws) - num_draws, num_draws)
    sampled[sample[accepted], column[accepted]] = tokens[accepted]
    return sampled, np.bincount(sample[accepted], minlength=len(num_draws)).astype(np.int32)


def _spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of 0 .. count in pieces of at most `most`."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
