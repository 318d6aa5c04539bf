"""ModelRunner: one SchedulerOutput in, one ModelRunnerOutput out."""

import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.pooling import PoolingPlan
from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.adapters import Adapters
from pagoda.worker.alignment import CrossQueries
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.devices import Device
from pagoda.worker.dry_runs import DryRuns
from pagoda.worker.encoders import EncoderOutputs
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.grammar_rows import GrammarMasks, GrammarRows
from pagoda.worker.launched_steps import LaunchedStep, LaunchedSteps, cause_of
from pagoda.worker.pooler import Pooler
from pagoda.worker.sampler import Drawn, Sampler, prompt_logprobs
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.staging import RowEmbeds, StepInputs, join_embeds
from pagoda.worker.table_mirror import TableMirror


class ModelRunner:
    """Executes steps one after the other.

    `launch` submits a step to the device; its results are collected when they are there. Tokens stay on the device for
    the next step, which may therefore be launched before: the host waits only where it has to read them, because of
    penalties, bad words, grammars, forks, beams or drafts. On a CPU a step is computed when `launch` returns.
    """

    def __init__(
        self,
        forward: ForwardRunner,
        table: TableMirror,
        cache: CacheEngine,
        device: Device,
        speculator: Speculator | None = None,
        grammars: GrammarRows | None = None,
        adapters: Adapters | None = None,
        pooling: PoolingPlan | None = None,
        embeds: RowEmbeds | None = None,
        place: RankPlace = WHOLE,
        encoders: EncoderOutputs | None = None,
    ) -> None:
        """speculator: proposes drafts after each step; None if nothing drafts.

        grammars: None if no request may have a grammar.   adapters: None if no request may have a LoRA adapter.
        pooling: in place of the model's own.   embeds: None if no prompt may be given as embeddings.
        place: of this rank. One that does not sample computes all that the sampling rank computes with it, and returns
        no results; it gets the tokens with the next steps. It needs no speculator and no grammars.
        encoders: None if the model reads neither images nor audio.
        """
        self._forward = forward
        self._table = table
        self._cache = cache
        self._device = device
        self._sampler = Sampler(forward.ops)
        self._speculator = speculator
        self._grammars = grammars
        self._adapters = adapters
        self._pooler = Pooler(forward, pooling)
        self._embeds = embeds
        self._encoders = encoders
        self._place = place
        self._steps = LaunchedSteps(table, speculator, device)
        self.times = self._steps.times
        # What applies a step's events, in this order: blocks move before rows read them, and the table changes last,
        # because drafters read what it was before.
        owners = (grammars, adapters, self._pooler, embeds, encoders, self._steps, table)
        self._appliers: list[Callable[[SchedulerOutput], None]] = [cache.apply]
        if speculator is not None:
            self._appliers.append(lambda output: speculator.apply(output, table))
        self._appliers += [owner.apply for owner in owners if owner is not None]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a forward pass of one token, writing to the null block, which is never read.

        If the kernels do not support this model and these settings, this fails at startup instead of in every request.
        A speculator measures steps over several tokens, so that it knows their cost before the first draft; with
        several ranks it learns it from the first steps, for the others would have to compute the same ones.
        """
        runs = DryRuns(self._forward, self._table, self._cache)
        runs.run_tokens(1, 1, 0)
        if self._speculator is not None and self._place.world_size == 1:
            # The first step of a size compiles kernels, and the second captures a graph: neither says what it costs.
            num_warm_up = 2 if self._forward.staging.padding is not None else 0
            self._speculator.measure_steps(runs.run_tokens, *self._table.token_ids.shape, num_warm_up)

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
        if self._speculator is not None:
            self._speculator.begin_step()
        self._apply(output)
        self.times.lap("events")
        if self._encoders is not None and output.encoder_inputs:  # also for rows that run in a later step only
            self._encoders.run(output)
            self.times.lap("encoder")
        step = self._without_results(output, begin_s) if output.is_empty else self._submit(output, begin_s)
        if self._place.world_size > 1:
            step.checksum = self._table.checksum(output.rows)
        self._steps.add(step)
        if (self._speculator is not None and self._speculator.is_on) or output.drafts:
            self._steps.collect_all()
        return step

    def _without_results(self, output: SchedulerOutput, begin_s: float) -> LaunchedStep:
        return LaunchedStep(output, self._device.to_host([]), self._steps.collect, begin_s, self._cache.swap_s)

    def _submit(self, output: SchedulerOutput, begin_s: float) -> LaunchedStep:
        """Submit the step's computations; `output` is not empty and has been applied."""
        slots = self._adapters.slots_of(output.rows) if self._adapters is not None else None
        embeds, states = self._embeds.take(output) if self._embeds is not None else None, None
        if (encoders := self._encoders) is not None:
            embeds, states = join_embeds((embeds, encoders.embeds(output))), encoders.states(output)
        inputs = self._forward.staging.fill(
            self._table, output, slots, self._pooler.kind, embeds, self._steps.last_tokens, states=states
        )
        masks: Future[GrammarMasks] | None = None
        if self._grammars is not None:  # filled while the forward runs
            masks = self._grammars.begin(self._table, inputs.draw_rows, inputs.draw_positions)
        self.times.lap("inputs")
        queries = CrossQueries.of(self._forward.ops, inputs, self._table.pooling, self._table.cross_groups)
        if queries is None:
            hidden, logits = self._forward.run(inputs.batch, self._cache.layers, inputs.size)
        else:
            hidden, logits = self._forward.run_op_by_op(inputs.batch, self._cache.layers, queries)
        self.times.lap("forward")
        drawn, owners = None, None
        if inputs.num_logits and self._place.samples:
            assert logits is not None
            drawn = self._draw(inputs, logits, masks)
            if not output.drafts:  # of several tokens per row, the host decides which are kept, before the next step
                owners = self._steps.keep_tokens(inputs, drawn)
        self.times.lap("sampling")
        failed = self._adapters.failed(output.rows) if self._adapters is not None else {}
        counts: list[tuple[int, int]] = []
        pieces: list[torch.Tensor] = []
        pooled: dict[int, np.ndarray] = {}
        if (inputs.prompt_rows or inputs.pooled) and self._place.is_last_stage:
            states = self._forward.states_of(inputs, hidden)
            counts, pieces = prompt_logprobs(inputs, states, self._table, self._forward)
            first = sum(count for _, _, count in inputs.prompt_rows)
            pooled, without_result = self._pooler.run(
                inputs.pooled, self._table.pooling, states[first:], slots, queries
            )
            failed |= without_result
        if not self._place.samples:
            return self._without_results(output, begin_s)
        copy = self._device.to_host([*(drawn.tensors if drawn is not None else []), *pieces])
        return LaunchedStep(
            output,
            copy,
            self._steps.collect,
            begin_s,
            self._cache.swap_s,
            inputs,
            owners,
            drawn,
            masks,
            counts,
            pooled,
            failed,
        )

    def _reads_tokens(self, output: SchedulerOutput) -> bool:
        """Return whether the host needs the tokens of steps in flight to prepare this one."""
        if output.forks or output.drafts or output.beams.rows.size:
            return True
        is_in_flight = self._steps.last_tokens.positions[output.rows] >= 0
        rows = output.rows[is_in_flight]
        if self._table.reads_output[rows].any():
            return True
        ends = (output.start + output.num_new)[is_in_flight]
        return self._grammars is not None and bool(self._grammars.masked(self._table, rows, ends))

    def _apply(self, output: SchedulerOutput) -> None:
        """Apply the step's events. A partial apply corrupts the table: fatal."""
        try:
            for apply in self._appliers:
                apply(output)
        except Exception as error:
            raise WorkerDied(f"step {output.step} could not be applied: {type(error).__name__}: {error}") from error

    def _draw(self, inputs: StepInputs, logits: torch.Tensor, pending_masks: "Future[GrammarMasks] | None") -> Drawn:
        """Sample the step's draws. There is at least one."""
        masks = None
        if pending_masks is not None:
            masks = pending_masks.result()
            self.times.lap("masks")
        draws = inputs.draw_rows, inputs.draw_positions
        return self._sampler.draw(inputs.logits_of_draws(logits), self._table, *draws, masks, inputs.draw_params)

    def shutdown(self) -> None:
        """End the thread that fills masks. Idempotent."""
        if self._grammars is not None:
            self._grammars.shutdown()
