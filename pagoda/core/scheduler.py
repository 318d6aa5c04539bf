"""Scheduler: which requests run in the next step, with how many tokens, in which blocks.

A step is planned in a few moves (passes/), each with the owners that it uses:

    mixed    run running -> resume swapped (unless something was preempted) -> admit waiting
    phased   admit whole prompts (unless something is swapped) -> run running (unless one entered) -> resume swapped
    both     -> advance the counts -> fork and join -> drain notifications and block moves -> build the output

and its results are applied by passes/commit_outputs.py.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig, SchedulingMode
from pagoda.base.errors import RequestError
from pagoda.core.beams import PendingBeams
from pagoda.core.checks import RequestChecks, check_config
from pagoda.core.chunk_limits import make_chunk_limits
from pagoda.core.decision_log import DecisionLog
from pagoda.core.drafts import Drafts
from pagoda.core.encoder import EncoderInputs
from pagoda.core.failures import failed_result
from pagoda.core.gates import GateContext, Gates
from pagoda.core.grammar import CompiledGrammars
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.invariants import check_invariants
from pagoda.core.kv import KVCacheManager, KVSizing
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox, only_finishes
from pagoda.core.passes import AdmitWaiting, CommitOutputs, ExtendBeams, FinishPlan, Fork, ResumeSwapped, RunRunning
from pagoda.core.policy import POLICIES, Policy
from pagoda.core.preemption import CostModel, Preemption, make_preemption_rule
from pagoda.core.queues import RequestQueue
from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import Counters, SchedulerStats
from pagoda.core.step_plan import StepPlan, build_output
from pagoda.core.stops import StopTokens


class Scheduler:
    """Plans steps and applies their results. Single-threaded; every call leaves the contract's invariants whole.

    num_blocks: usable device blocks; block 0 is one more, the null block.
    num_host_blocks: blocks of the swap pool, with ids from 0.
    encoder_decoder: a request's encoder input is run in its first step and read through cross-attention tables.
    grammars: says when a request's grammar is compiled; until then it waits. None: no request has a grammar.
    max_rows: capacity of the row table; workers size theirs by it.
    """

    def __init__(
        self,
        config: SchedulerOptions,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        clock: Clock,
        num_host_blocks: int = 0,
        encoder_decoder: bool = False,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        check_config(config, kv_groups, num_blocks, max_model_len)
        self.config = config
        self.max_model_len = max_model_len
        self._clock = clock
        self._step = 0
        self._phased = config.scheduling_mode is SchedulingMode.PHASED
        self._log = log = DecisionLog(config.decision_log_steps)
        self._counters = counters = Counters()
        self._stops = StopTokens()
        self._requests: dict[str, RequestState] = {}  # written by Lifecycle
        policy: Policy = POLICIES[config.scheduling_policy]()
        sizing = KVSizing.of(kv_groups, cache.block_size, max_model_len, config)
        self.max_rows = config.max_rows
        has_windows, is_async = any(group.is_window for group in sizing.groups), config.async_scheduling
        has_encoder = config.encoder_budget > 0
        self._table = table = RequestTable(
            self.max_rows, max_model_len, track_in_flight=has_windows or has_encoder, expect_tokens=is_async
        )
        self._kv = kv = KVCacheManager(table, sizing, num_blocks, num_host_blocks, cache, config, counters)
        self._in_flight = in_flight = StepsInFlight()
        self._outbox = outbox = Outbox(self.max_rows)
        self._waiting, self._swapped = waiting, swapped = RequestQueue(), RequestQueue()
        self._drafts = drafts = Drafts(table, counters)
        self._batch = batch = RunningBatch(table, kv, in_flight, drafts, async_scheduling=is_async)
        whole_items = config.no_partial_media and not encoder_decoder
        encoder = EncoderInputs(
            table,
            config.encoder_cache_tokens,
            config.encoder_budget,
            encoder_decoder=encoder_decoder,
            whole_items=whole_items,
        )
        gates = Gates(GateContext(config, table, batch, in_flight, waiting, grammars), log)
        self._limits = limits = make_chunk_limits(
            config, self._requests, batch, drafts, table, encoder, whole_items=whole_items
        )
        beams = PendingBeams()
        forgetful = (kv, drafts, batch, encoder, beams)
        self._lifecycle = lifecycle = Lifecycle(
            self._requests, table, kv, batch, in_flight, outbox, waiting, swapped, self._stops, gates, limits, policy,
            clock, log, forgetful,
        )  # fmt: skip
        costs = CostModel()
        rule = make_preemption_rule(config.preemption_mode, costs)
        self._preemption = preemption = Preemption(
            config, policy, rule, table, kv, batch, in_flight, lifecycle, encoder, outbox, log, counters
        )
        self._checks = checks = RequestChecks(config, table, kv, encoder, policy)
        self._run_running = RunRunning(table, kv, drafts, batch, limits, preemption, lifecycle, outbox)
        self._resume_swapped = ResumeSwapped(swapped, gates, kv, batch, limits, lifecycle, outbox, log)
        self._admit_waiting = AdmitWaiting(
            waiting, table, kv, batch, gates, checks, limits, preemption, lifecycle, outbox, log
        )
        fork = Fork(table, kv, batch, lifecycle, limits)
        self._finish_plan = FinishPlan(table, kv, batch, outbox, encoder, beams, fork, log)
        extend_beams = ExtendBeams(table, kv, batch, lifecycle, outbox, beams)
        self._commit = CommitOutputs(
            table, kv, drafts, batch, in_flight, outbox, lifecycle, preemption, encoder, extend_beams, self._stops,
            costs, counters, clock,
        )  # fmt: skip

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Add `request` to the waiting queue.

        Raises RequestError for an id that is in use, or what no engine of this size can serve.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        state = self._checks.make_state(request)
        self._kv.hash_prompt(state)
        self._lifecycle.add(state)

    def finish_requests(
        self, request_ids: str | Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> dict[int, EngineCoreOutputs]:
        """End requests in whatever queue they are; ids that have ended are ignored. Return the ends by client.

        Blocks are free at once: steps in flight run before any step that could reuse them.
        """
        finishes: dict[int, list[Finish]] = {}
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            request = self._requests.get(request_id)
            if request is not None:
                ended = self._lifecycle.finish_all(request, status)
                finishes.setdefault(request.facts.client_index, []).extend(ended)
        return {client: only_finishes(ended) for client, ended in finishes.items()}

    def finish_sequence(
        self, request_id: str, index: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> dict[int, EngineCoreOutputs]:
        """End one sequence (a stop string was found in its text); the others continue. Nothing, if it has ended.

        A beam search ends as a whole.
        """
        request = self._requests.get(request_id)
        if request is None or index >= len(request.sequences) or request.sequences[index].is_finished:
            return {}
        finishes = self._lifecycle.finish_one(request.sequences[index], status)
        return {request.facts.client_index: only_finishes(finishes)}

    # Steps

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Changes state: called again before the result is back, it plans the step after."""
        self._step += 1
        config = self.config
        plan = StepPlan(self._step, config.max_num_batched_tokens, config.encoder_budget, self._clock.now())
        if self._log.enabled:
            self._log.open_step(self._step)
        self._limits.narrow(plan)
        if self._phased:
            self._plan_phased(plan)
        else:
            self._plan_mixed(plan)
        self._finish_plan.run(plan)
        output = build_output(plan)
        if not output.is_empty:
            self._in_flight.opened(output, plan.now_s if plan.has_prompts else None)
        return output

    def _plan_mixed(self, plan: StepPlan) -> None:
        if self._batch.requests:
            self._run_running.run(plan)
        if plan.preempted or (self._swapped and not self._resume_swapped.run(plan)):
            return
        if self._waiting and plan.budget > 0:
            self._admit_waiting.run(plan)

    def _plan_phased(self, plan: StepPlan) -> None:
        if self._waiting and not self._swapped:
            self._admit_waiting.run(plan)
        if plan.is_empty:
            if self._batch.requests:
                self._run_running.run(plan)
            if self._swapped and not plan.preempted:
                self._resume_swapped.run(plan)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the result of a step, in the order of planning. Return what each client gets.

        Of a step with nothing to compute, `model_output` may be None; requests that ended while it was planned are
        still returned.
        """
        if scheduler_output.is_empty:
            return self._outbox.take_deferred()
        if model_output is None:
            raise ValueError(
                f"step {scheduler_output.step} computes {scheduler_output.total_num_scheduled_tokens} tokens: "
                "update_from_output needs its ModelRunnerOutput, not None"
            )
        outputs = self._commit.run(scheduler_output, model_output)
        if model_output.drafts:
            self._offer_drafts(model_output.drafts)
        if self.config.check_invariants:
            self.check()
        return outputs

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
        """Apply that a step raised, in the order of planning. Its sequences end with ERROR and `message`.

        Its events (block moves, rows) must have been applied. Requests that depend on its results in steps that were
        planned after it are computed again.
        """
        if scheduler_output.is_empty:
            return self._outbox.take_deferred()
        outputs = self._commit.run(scheduler_output, failed_result(scheduler_output, message), raised=True)
        if self.config.check_invariants:
            self.check()
        return outputs

    def update_draft_token_ids(self, drafts: Mapping[str | tuple[str, int], Sequence[int]]) -> None:
        """Offer draft tokens to verify in the next step, by request id (its first sequence) or (request id, sequence).

        Drafts for a row that is mid-prefill, or whose last token is still in flight, are dropped: they would not fit.
        Those for beams are dropped, too.
        """
        by_row: dict[int, Sequence[int] | np.ndarray] = {}
        for key, tokens in drafts.items():
            request_id, index = (key, 0) if isinstance(key, str) else key
            request = self._requests.get(request_id)
            if request is not None:
                by_row[request.sequences[index].row] = tokens
        self._offer_drafts(by_row)

    def _offer_drafts(self, drafts: Mapping[int, Sequence[int] | np.ndarray]) -> None:
        """`update_draft_token_ids` by row; rows without a running sequence are ignored."""
        for row, tokens in drafts.items():
            sequence = self._table.sequence_of[row] if row >= 0 else None
            if sequence is not None and sequence.row == row:
                self._drafts.offer(row, () if row in self._batch.prefilling else tokens)
        self._batch.changed(rows=False)

    # Questions

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting); swapped requests count as waiting."""
        return len(self._batch.requests), len(self._waiting) + len(self._swapped)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached content. Return False while blocks are in use. preempt_running: preempt all requests first.

        Their tokens in flight are dropped when they come back; they are computed again in the very next step.
        """
        if preempt_running:
            self._preemption.preempt_all()
        return self._kv.reset()

    def make_stats(self) -> SchedulerStats:
        """Return gauges and totals."""
        loras = [request.facts.lora for request in self._batch.requests.values()]
        return SchedulerStats.of(
            self._counters,
            num_running=len(self._batch.requests),
            num_waiting=len(self._waiting),
            num_swapped=len(self._swapped),
            num_blocks=self._kv.num_blocks,
            num_free_blocks=self._kv.num_free_blocks,
            num_free_host_blocks=self._kv.num_free_host_blocks,
            running_adapters={lora.name for lora in loras if lora is not None},
            waiting_adapters=self._waiting.adapter_names() | self._swapped.adapter_names(),
        )

    @property
    def explain(self) -> DecisionLog:
        """Why the last steps were planned as they were (`decision_log_steps` of them)."""
        return self._log

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        return self._kv.num_free_host_blocks

    def running_ids(self) -> list[str]:
        """Return ids in order of admission."""
        return list(self._batch.requests)

    def waiting_ids(self) -> list[str]:
        """Return ids in queue order."""
        return [request.request_id for request in self._waiting]

    def swapped_ids(self) -> list[str]:
        """Return ids in queue order."""
        return [request.request_id for request in self._swapped]

    def num_computed_tokens(self, request_id: str) -> list[int]:
        """Return the count of each unfinished sequence that has been started (one entry before the fork)."""
        request = self._requests[request_id]
        started = [one for one in request.unfinished if one.row >= 0 or not request.awaiting_fork]
        counts = self._table.num_computed
        return [int(counts[one.row]) if one.row >= 0 else one.num_computed for one in started or request.unfinished[:1]]

    def num_blocks_held(self, request_id: str) -> list[int]:
        """Return distinct device blocks that the request references, per KV group, without the null block."""
        return self._kv.num_blocks_held(self._requests[request_id].rows)

    def check(self) -> None:
        """Check the contract's invariants. Raises InvariantBroken."""
        check_invariants(
            self._requests, table=self._table, kv=self._kv, drafts=self._drafts, batch=self._batch,
            in_flight=self._in_flight, waiting=self._waiting, swapped=self._swapped, stops=self._stops,
            max_num_seqs=self.config.max_num_seqs,
        )  # fmt: skip
