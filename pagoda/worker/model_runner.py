"""ModelRunner: one SchedulerOutput in, one ModelRunnerOutput out."""

import time
from concurrent.futures import Future

import numpy as np
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.pooling import PoolingPlan
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.adapters import Adapters
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.device_failure import cause_of
from pagoda.worker.devices import Device
from pagoda.worker.drafting import Drafting
from pagoda.worker.dry_runs import DryRuns
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.grammar_rows import GrammarMasks, GrammarRows
from pagoda.worker.inputs import StepInputs, build_inputs
from pagoda.worker.launched_step import LaunchedStep, Submitted
from pagoda.worker.pooler import Pooler
from pagoda.worker.prompt_embeds import PromptEmbeds
from pagoda.worker.sampler import Drawn, Sampler, prompt_logprobs
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.step_collector import StepCollector
from pagoda.worker.step_times import StepTimes
from pagoda.worker.table_mirror import TableMirror
from pagoda.worker.tokens_in_flight import TokensInFlight


class ModelRunner:
    """Executes steps one after the other.

    `launch` submits a step to the device; its results are collected when they are there. Tokens stay on the device for
    the next step, which may therefore be launched before: the host waits only where it has to read them, because of
    penalties, bad words, grammars, forks, beams or drafts. On a CPU a step is computed when `launch` returns.
    """

    def __init__(
        self,
        forward: ForwardPass,
        table: TableMirror,
        cache: CacheEngine,
        device: Device,
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
        self._drafting = Drafting(speculator, grammars)
        self._grammars = grammars
        self._adapters = adapters
        self._pooler = Pooler(forward, pooling)
        self._embeds = embeds
        self._tokens = TokensInFlight(len(table.num_tokens), device.device)
        self.times = StepTimes()
        self._steps = StepCollector(table, self._tokens, self._drafting, self.times, device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a forward pass of one token, writing to the null block, which is never read.

        If the kernels do not support this model and these settings, this fails at startup instead of in every request.
        A speculator measures steps over several tokens, so that it knows their cost before the first draft.
        """
        runs = DryRuns(self._forward, self._table, self._cache, self._device.device, self._sampler)
        runs.run_tokens(1, 1, 0)
        if self._drafting.speculator is not None:
            # The first step of a size compiles kernels, and the second captures a graph: neither says what it costs.
            num_warm_up = 2 if self._forward.decode_inputs is not None else 0
            self._drafting.speculator.measure_steps(runs.run_tokens, *self._table.token_ids.shape, num_warm_up)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """As `launch`; return the step's results once they are on the host."""
        return self.launch(output).result()

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Apply the step's events, then submit its computations to the device.

        A row whose logits are not finite is reported in `failed` and gets no token; other rows are not affected. An
        error concerns this step only, except for WorkerDied.
        """
        try:
            return self._launch(output)
        except Exception as error:
            cause = cause_of(error, self._device)
            if cause is error:
                raise
            raise cause from error

    @torch.inference_mode()
    def _launch(self, output: SchedulerOutput) -> LaunchedStep:
        begin_s = time.perf_counter()
        self.times.begin()
        self._steps.collect_done()
        if self._steps and self._reads_tokens(output):
            self._steps.collect_all()
            self.times.lap("waiting for tokens")
        self._drafting.begin_step()
        swap_s = self._apply(output)
        self.times.lap("events")
        if output.is_empty:
            submitted = Submitted(output, self._device.to_host([]), begin_s, swap_s)
        else:
            submitted = self._submit(output, begin_s, swap_s)
        step = self._steps.add(submitted)
        if self._drafting.is_on or output.drafts:
            self._steps.collect_all()
        return step

    def _submit(self, output: SchedulerOutput, begin_s: float, swap_s: float) -> Submitted:
        slots = self._adapters.slots_of(output.rows) if self._adapters is not None else None
        embeds = self._embeds.take(output) if self._embeds is not None else None
        types = self._forward.num_token_types
        inputs = build_inputs(
            self._table,
            output,
            self._device.device,
            slots,
            self._pooler.kind,
            types,
            embeds,
            self._tokens,
            self._forward.decode_inputs,
        )
        masks: Future[GrammarMasks] | None = None
        if self._grammars is not None:  # filled while the forward runs
            masks = self._grammars.begin(self._table, inputs.draw_rows, inputs.draw_positions)
        self.times.lap("inputs")
        hidden = inputs.run(self._forward, self._cache.layers)
        self.times.lap("forward")
        drawn, users = self._draw(inputs, output, hidden, masks)
        self.times.lap("sampling")
        failed = self._adapters.failed(output.rows) if self._adapters is not None else {}
        counts, pieces = prompt_logprobs(
            inputs, self._table, self._sampler, lambda begin, end: self._logits(inputs, hidden, begin, end)
        )
        pooled: dict[int, np.ndarray] = {}
        if inputs.pooled:
            first = hidden.shape[0] - sum(chunk.count for chunk in inputs.pooled)
            pooled, without_result = self._pooler.run(inputs.pooled, self._table.pooling, hidden[first:], slots)
            failed |= without_result
        copy = self._device.to_host([*(drawn.tensors if drawn is not None else []), *pieces])
        return Submitted(output, copy, begin_s, swap_s, inputs, users, drawn, masks, counts, pooled, failed)

    def _reads_tokens(self, output: SchedulerOutput) -> bool:
        """Return whether the host needs the tokens of steps in flight to prepare this one."""
        if output.forks or output.drafts or output.beams.rows.size:
            return True
        rows = output.rows[self._tokens.positions[output.rows] >= 0]
        reads = bool(self._table.reads_output[rows].any())
        return reads or (self._grammars is not None and self._grammars.has_any(rows))

    def _apply(self, output: SchedulerOutput) -> float:
        """Apply the step's events; return the seconds its swaps took. A partial apply corrupts the table: fatal."""
        try:
            swap_s = self._cache.apply(output)
            self._drafting.apply(output, self._table)
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
