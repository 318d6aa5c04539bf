"""ModelRunner: one SchedulerOutput in, one ModelRunnerOutput out."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.pooling import PoolingPlan
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.kernels.transfer import to_device
from pagoda.worker.adapters import Adapters
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.devices.streams import HostStreams, Streams
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.grammar_rows import GrammarMasks, GrammarRows
from pagoda.worker.inputs import StepInputs, build_inputs
from pagoda.worker.launched_step import (
    LaunchedStep,
    Submitted,
    accepted_draws,
    prompt_logprob_columns,
    tokens_by_sample,
)
from pagoda.worker.pooler import Pooler
from pagoda.worker.prompt_embeds import PromptEmbeds
from pagoda.worker.sampler import Drawn, Sampled, Sampler
from pagoda.worker.speculation.speculator import NEVER_DRAFTS, Speculator
from pagoda.worker.step_times import StepTimes
from pagoda.worker.tokens_in_flight import TokensInFlight

logger = logging.getLogger("pagoda")

_NO_TOKENS = np.empty((0, 1), np.int32)
_NO_COUNTS = np.empty(0, np.int32)
_NOT_FINITE = "the model's logits are not finite, or all tokens are forbidden"
_PROMPT_LOGITS_ROWS = 256  # prompt positions whose logits are in memory at once


class ModelRunner:
    """Executes steps one after the other.

    `launch` submits a step to the device; its results are collected when they are there. Tokens stay on the device for
    the next step, which may therefore be launched before: the host waits only where it has to read them, because of
    penalties, bad words, grammars, forks, beams or drafts. On a CPU a step is computed when `launch` returns.
    """

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
        streams: Streams | None = None,
    ) -> None:
        """speculator: proposes drafts after each step; None if nothing drafts.

        grammars: None if no request may have a grammar.   adapters: None if no request may have a LoRA adapter.
        pooling: in place of the model's own.   embeds: None if no prompt may be given as embeddings.
        streams: of the device; None: a CPU's.
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
        self._streams = streams or HostStreams()
        self._tokens = TokensInFlight(len(table.num_tokens), device)
        self._launched: deque[LaunchedStep] = deque()  # and not collected
        self._end_s = 0.0  # when the last step was collected
        self.times = StepTimes()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a forward pass of one token, writing to the null block, which is never read.

        If the kernels do not support this model and these settings, this fails at startup instead of in every request.
        A speculator measures steps over several tokens, so that it knows their cost before the first draft.
        """
        self._run_tokens(1, 0)
        if self._speculator is not None:
            self._speculator.measure_steps(self._run_tokens, self._table.token_ids.shape[1])

    def _run_tokens(self, num_tokens: int, start: int) -> None:
        """Compute a step over this many tokens of one row, all but one of them drafts, and wait for its logits."""
        row, begin, count = np.zeros(1, np.int32), np.full(1, start, np.int32), np.full(1, num_tokens, np.int32)
        drafts = {0: np.zeros(num_tokens - 1, np.int32)} if num_tokens > 1 else {}
        logits = self._dry_logits(SchedulerOutput(0, row, begin, count, row, row, num_tokens, drafts=drafts))
        if logits is not None:
            logits[-1, -1].item()

    @torch.inference_mode()
    def dry_run(self, output: SchedulerOutput) -> None:
        """Compute a step, up to its log-probabilities, of rows that are not in the table: their tokens are all 0."""
        logits = self._dry_logits(output)
        if logits is not None:
            chosen = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            self._sampler.top_logprobs(logits, chosen, 0)

    @torch.inference_mode()
    def _dry_logits(self, output: SchedulerOutput) -> torch.Tensor | None:
        """As `dry_run`, up to the logits; return them, float32 [num_logits, V], or None if the model has none."""
        for row, start, num_new in zip(output.rows, output.start, output.num_new, strict=True):
            self._table.token_ids[row, start : start + num_new] = 0
        inputs = build_inputs(self._table, output, self._device, num_token_types=self._forward.num_token_types)
        hidden = self._forward.forward(inputs.batch, self._cache.layers)
        if not self._forward.generates:
            return None
        if not inputs.takes_all_logits:
            hidden = self._forward.select_rows(hidden, inputs.batch.logits_index)
        return self._forward.compute_logits(hidden)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """As `launch`; return the step's results once they are on the host."""
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Apply the step's events, then submit its computations to the device.

        A row whose logits are not finite is reported in `failed` and gets no token; other rows are not affected.
        """
        begin_s = time.perf_counter()
        self.times.begin()
        self._collect_done()
        if self._launched and self._reads_tokens(output):
            self._collect(self._launched[-1])
            self.times.lap("waiting for tokens")
        if self._speculator is not None:
            self._speculator.begin_step()
        swap_s = self._apply(output)
        self.times.lap("events")
        if output.is_empty:
            submitted = Submitted(output, self._streams.to_host([]), begin_s, swap_s)
        else:
            submitted = self._submit(output, begin_s, swap_s)
        step = LaunchedStep(submitted, self._collect)
        self._launched.append(step)
        if self._speculator is not None or output.drafts:
            self._collect(step)
        return step

    def _submit(self, output: SchedulerOutput, begin_s: float, swap_s: float) -> Submitted:
        slots = self._adapters.slots_of(output.rows) if self._adapters is not None else None
        embeds = self._embeds.take(output) if self._embeds is not None else None
        types = self._forward.num_token_types
        inputs = build_inputs(self._table, output, self._device, slots, self._pooler.kind, types, embeds, self._tokens)
        masks: Future[GrammarMasks] | None = None
        if self._grammars is not None:  # filled while the forward runs
            masks = self._grammars.begin(self._table, inputs.draw_rows, inputs.draw_positions)
        self.times.lap("inputs")
        hidden = self._forward.forward(inputs.batch, self._cache.layers)
        self.times.lap("forward")
        if not inputs.takes_all_logits:
            hidden = self._forward.select_rows(hidden, inputs.batch.logits_index)
        drawn, users = self._draw(inputs, output, hidden, masks)
        self.times.lap("sampling")
        failed = self._adapters.failed(output.rows) if self._adapters is not None else {}
        counts, pieces = self._prompt_logprobs(inputs, hidden)
        pooled: dict[int, np.ndarray] = {}
        if inputs.pooled:
            first = hidden.shape[0] - sum(chunk.count for chunk in inputs.pooled)
            pooled, without_result = self._pooler.run(inputs.pooled, self._table.pooling, hidden[first:], slots)
            failed |= without_result
        copy = self._streams.to_host([*(drawn.tensors if drawn is not None else []), *pieces])
        return Submitted(output, copy, begin_s, swap_s, inputs, users, drawn, masks, counts, pooled, failed)

    def _reads_tokens(self, output: SchedulerOutput) -> bool:
        """Return whether the host needs the tokens of steps in flight to prepare this one."""
        if output.forks or output.drafts or output.beams.rows.size:
            return True
        rows = output.rows[self._tokens.positions[output.rows] >= 0]
        reads = bool(self._table.reads_output[rows].any())
        return reads or (self._grammars is not None and self._grammars.has_any(rows))

    def _collect_done(self) -> None:
        """Collect the steps whose results are there."""
        while self._launched and self._launched[0].is_done():
            self._collect(self._launched[0])

    def _collect(self, last: LaunchedStep) -> None:
        """Collect the results of all steps up to `last`, in order."""
        step = None
        while step is not last:
            step = self._launched.popleft()
            try:
                step.set_result(self._results_of(step.submitted))
            except Exception as error:  # raised to whom asks for this step's results
                step.set_result(error)

    def _results_of(self, step: Submitted) -> ModelRunnerOutput:
        """Wait for a step's results and commit its tokens to the table."""
        arrays = step.copy.wait()
        self.times.resume()
        output, inputs, failed = step.output, step.inputs, step.failed
        sampled, num_sampled, logprobs = _NO_TOKENS, _NO_COUNTS, None
        masks = step.masks.result() if step.masks is not None else None
        if step.drawn is not None:
            assert inputs is not None
            num_arrays = len(step.drawn.tensors)
            drawn, arrays = step.drawn.on_host(arrays[:num_arrays]), arrays[num_arrays:]
            failed = _failed_draws(inputs, drawn, masks) | failed
            accepted = accepted_draws(inputs, drawn, output)
            self._commit(step, drawn, accepted)
            sampled, num_sampled = tokens_by_sample(inputs.num_draws, drawn.tokens, accepted)
            logprobs = drawn.logprobs
            if logprobs is not None and not accepted.all():
                logprobs = logprobs[accepted]
        self.times.lap("results")
        drafts: dict[int, np.ndarray] = {}
        if self._speculator is not None and not output.is_empty:
            drafts = self._draft(self._speculator, output, num_sampled, failed)
            self.times.lap("drafting")
        no_drafts_until = self._speculator.no_drafts_until if self._speculator is not None else NEVER_DRAFTS
        now_s = time.perf_counter()
        duration_s = now_s - max(step.begin_s, self._end_s)
        self._end_s = now_s
        return ModelRunnerOutput(
            step=output.step,
            sampled=sampled,
            num_sampled=num_sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprob_columns(step.prompt_logprobs, arrays),
            pooled=step.pooled,
            failed=failed,
            refused=masks.refused if masks is not None else frozenset(),
            duration_s=duration_s,
            swap_s=step.swap_s,
            drafts=drafts,
            no_drafts_until=no_drafts_until if not output.is_empty else 0,
        )

    def _commit(self, step: Submitted, drawn: Sampled, accepted: np.ndarray) -> None:
        """Write a step's tokens to the rows that still belong to the sequences they were sampled for."""
        assert step.inputs is not None
        rows, positions = step.inputs.draw_rows, step.inputs.draw_positions
        if step.users is not None:
            accepted = accepted & self._tokens.arrived(rows, positions, step.users)
        self._table.commit(rows[accepted], positions[accepted], drawn.tokens[accepted])

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
            self._tokens.apply(output)
            self._table.apply(output)
        except Exception as error:
            raise WorkerDied(f"step {output.step} could not be applied: {type(error).__name__}: {error}") from error
        return swap_s

    def _draw(
        self,
        inputs: StepInputs,
        output: SchedulerOutput,
        hidden: torch.Tensor,
        pending_masks: "Future[GrammarMasks] | None",
    ) -> tuple[Drawn | None, np.ndarray | None]:
        """Sample the step's draws, and keep the tokens on the device; return them and `Submitted.users`."""
        if not inputs.draw_rows.size:
            return None, None
        logits = self._logits(inputs, hidden, 0, inputs.num_logits)
        self.times.lap("lm_head")
        if inputs.draw_logits is not None:
            logits = logits.index_select(0, inputs.draw_logits)
        masks = None
        if pending_masks is not None:
            masks = pending_masks.result()
            self.times.lap("masks")
        rows, positions = inputs.draw_rows, inputs.draw_positions
        drawn = self._sampler.draw(logits, self._table, rows, positions, masks, inputs.draw_params)
        if output.drafts:  # several tokens per row: the host decides which are kept, before the next step
            return drawn, None
        return drawn, self._tokens.sampled(rows, positions, inputs.draw_index, drawn.tokens)

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

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: torch.Tensor
    ) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        """Compute the log-probabilities of the next prompt token at the step's prompt positions that need them.

        Return Submitted.prompt_logprobs and their tensors.
        """
        counts: list[tuple[int, int]] = []
        pieces: list[torch.Tensor] = []
        offset = inputs.num_logits
        for row, first, count in inputs.prompt_rows:
            k = int(self._table.num_prompt_logprobs[row])
            spans = list(_spans(count, _PROMPT_LOGITS_ROWS))
            for begin, end in spans:
                logits = self._logits(inputs, hidden, offset + begin, offset + end)
                following = self._table.token_ids[row, first + begin + 1 : first + end + 1].astype(np.int64)
                (chosen,) = to_device([following], logits.device)
                columns = self._sampler.top_logprobs(logits, chosen, k)
                pieces += [columns.token_ids, columns.logprobs, columns.ranks]
            counts.append((row, len(spans)))
            offset += count
        return counts, pieces


def _failed_draws(inputs: StepInputs, drawn: Sampled, masks: GrammarMasks | None) -> dict[int, str]:
    """Return the rows that get no token, with the reason; mark the draws of rows whose grammar has failed."""
    if masks is not None and masks.failed:
        drawn.finite[np.isin(inputs.draw_rows, list(masks.failed))] = False
    if drawn.finite.all():
        return {}
    first = np.cumsum(inputs.num_draws) - inputs.num_draws
    failed = dict.fromkeys(inputs.draw_rows[first[~drawn.finite[first]]].tolist(), _NOT_FINITE)
    return failed | (masks.failed if masks is not None else {})


def _spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of 0 .. count in pieces of at most `most`."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
