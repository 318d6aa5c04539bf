"""SchedulerState: everything the scheduler knows, and the verbs that move a request between its queues."""

import logging
from collections import deque
from collections.abc import Iterable

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig, SchedulerConfig
from pagoda.core.decision_log import DecisionLog, Preempted
from pagoda.core.encoder_cache import EncoderCache
from pagoda.core.gates import DelayGate, Gate, LateOutputGate, LoraGate
from pagoda.core.kv_cache_manager import KVCacheManager
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.kv_swap import KVSwap
from pagoda.core.policy import POLICIES, Policy
from pagoda.core.preemption import CostModel, make_preemption_rule
from pagoda.core.queues import WaitingLine
from pagoda.core.request import RequestStatus
from pagoda.core.request_table import Branch, LiveRequest, RequestTable
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, SchedulerOutput
from pagoda.core.scheduler_stats import Counters
from pagoda.core.step_plan import Lineup, StepPlan

logger = logging.getLogger("pagoda")

NO_HANDLES = np.empty(0, np.int64)


class SchedulerState:
    """The queues, the table, the pools, and what is in flight. Written by the scheduler's passes, one at a time."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        clock: Clock,
        num_host_blocks: int,
        encoder_decoder: bool,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.clock = clock
        self.encoder_decoder = encoder_decoder
        depth = max(config.pipeline_depth, 1)
        max_blocks = -(-max_model_len // cache.block_size)
        # A row is given out again when the steps that name it are home: each step in flight may keep a full set.
        self.table = RequestTable(config.max_num_seqs * depth, max_model_len, max_blocks, kv_groups)
        self.kv = KVCacheManager(
            self.table,
            kv_groups,
            block_size=cache.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_lookahead_slots=config.num_lookahead_slots,
            max_in_flight_tokens=config.max_num_batched_tokens * depth,
            enable_prefix_caching=cache.enable_prefix_caching,
            prefix_hash_seed=cache.prefix_hash_seed,
        )
        self.swap = KVSwap(self.kv, num_host_blocks)
        self.watermark_blocks = int(cache.watermark * (num_blocks + 1))
        self.policy: Policy = POLICIES[config.scheduling_policy]()
        self.costs = CostModel()
        self.preemption_rule = make_preemption_rule(config.preemption_mode, self.costs)
        self.live: dict[str, LiveRequest] = {}
        self.waiting = WaitingLine()
        self.swapped = WaitingLine()
        self.running: dict[str, LiveRequest] = {}  # in order of admission
        self.lora_gate = LoraGate(config.max_loras)
        self.gates: list[Gate] = [LateOutputGate()]
        self.delay_gate = DelayGate(config.scheduler_delay_factor)
        self.encoder = EncoderCache(config.encoder_cache_tokens)
        self.log = DecisionLog(config.decision_log_steps)
        self.counters = Counters()
        self.in_flight: deque[SchedulerOutput] = deque()
        self.late_branches: dict[int, list[Branch]] = {}  # step in flight -> branches that left their row meanwhile
        self.step = 0
        self.num_admissions = 0
        self.num_seats_taken = 0  # unfinished branches of running requests, those that wait for their fork included
        # What the next SchedulerOutput must tell, and what clients must be told.
        self.released_rows: list[int] = []
        self.finished_ids: list[str] = []
        self.ended_in_planning: list[Finish] = []
        self.untold: dict[int, list[Finish]] = {}
        self.preempted_by_reset: list[str] = []
        # Rows that need more than "one more token": everything else is left to numpy.
        self.drafts: dict[int, np.ndarray] = {}
        self.prefilling: dict[int, None] = {}  # the last planned chunk did not reach the end of the known tokens
        self.forking: dict[int, LiveRequest] = {}  # first row -> request whose branches wait for its prompt
        self.joining: dict[
            int, LiveRequest
        ] = {}  # first row -> resumed request whose branches wait for the shared blocks
        self.media_rows: dict[int, LiveRequest] = {}
        self.silent: dict[int, LiveRequest] = {}  # first emission, and with it the count of cached tokens, is to come
        self.prompt_steps: dict[int, float] = {}  # step in flight that computes prompts -> when it was planned
        self.steady = False  # every running row lacks exactly one token
        self.quiet_steps = -1  # steady steps that certainly need no block and end no row
        self._lineup: Lineup | None = None

    @property
    def lineup(self) -> Lineup:
        if self._lineup is None:
            self._lineup = Lineup.of(self.table, self.kv.pool.ref_count)
        return self._lineup

    def running_set_changed(self) -> None:
        self._lineup = None
        self.quiet_steps = -1

    def _incomplete(self) -> Iterable[LiveRequest]:
        return (*self.forking.values(), *self.joining.values())

    def register_filled(self, plan: StepPlan) -> None:
        """Name the blocks that running rows have filled, this step's included: decoding leaves that to who looks up."""
        if not self.kv.content.caching:
            return
        rows, start, num_new = plan.arrays()
        ends = self.table.num_computed - self.table.num_pending
        ends[rows] = start + num_new
        rows = self.lineup.rows
        for row in rows[self.kv.content.unregistered(rows, ends[rows])].tolist():
            self.kv.content.register(row, int(ends[row]))

    # A branch takes or leaves a row

    def give_row(self, branch: Branch, num_computed: int) -> int:
        row = self.table.admit(branch, num_computed)
        self.running_set_changed()
        self.steady = False
        return row

    def take_row(self, branch: Branch) -> None:
        """The branch leaves its row and all its blocks."""
        row = branch.row
        self.kv.content.register(row, int(self.table.num_computed[row] - self.table.num_pending[row]))
        self.kv.release(row)
        self.leave_row(branch)

    def leave_row(self, branch: Branch) -> None:
        """The branch leaves its row, whose blocks are gone already."""
        row = branch.row
        if self.in_flight:
            for output in self.in_flight:
                if (output.rows == row).any() or (output.sample_rows == row).any():
                    branch.in_flight_steps.add(output.step)
                    self.late_branches.setdefault(output.step, []).append(branch)
        self.kv.moves.forget_row(row)
        self.table.release(branch, self.in_flight[-1].step if self.in_flight else 0)
        self.released_rows.append(row)
        for column in (self.prefilling, self.forking, self.joining, self.media_rows, self.silent):
            column.pop(row, None)
        self.drop_drafts(row)
        self.running_set_changed()

    def offer_drafts(self, row: int, drafts: np.ndarray) -> None:
        self.drafts[row] = drafts
        self.table.num_drafts[row] = len(drafts)
        self.steady = False

    def drop_drafts(self, row: int) -> np.ndarray | None:
        """The row's offered drafts, which it has no more."""
        self.table.num_drafts[row] = 0
        return self.drafts.pop(row, None)

    # A request leaves the running set

    def preempt(self, victim: LiveRequest, plan: StepPlan, for_request: LiveRequest) -> None:
        """Throw `victim` out of the running set and out of the step; its KV is dropped or parked in host memory."""
        rows = [branch.row for branch in victim.branches if branch.row >= 0]
        free_before = self.kv.pool.num_free
        lost = sum(int(self.table.num_computed[row]) for row in rows)
        for row in rows:
            plan.take_out(row)
            self._return_encoder_runs(row, plan)
            self.kv.content.unregister_uncomputed(row)
        swap = (
            victim.request_id not in self._unforked_ids()
            and not any(self._has_media_ahead(row) for row in rows)
            and self.preemption_rule.prefers_swap(victim, lost, self._num_held_blocks(rows))
            and self.swap.has_room_for(rows)
        )
        if swap:
            self._park(victim, rows)
        else:
            self._drop(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self.encoder.drop_all(victim)
        self._leave_running(victim)
        plan.preempted.append(victim)
        if self.log.enabled:
            freed = self.kv.pool.num_free - free_before
            mode = "swap" if swap else "recompute"
            self.log.note(Preempted(victim.request_id, for_request.request_id, mode, 0 if swap else lost, freed))

    def _has_media_ahead(self, row: int) -> bool:
        """Whether the row still needs encoder outputs, which it loses when it leaves."""
        live = self.media_rows.get(row)
        if live is None or self.encoder_decoder:
            return False
        return any(item.offset + item.length > self.table.num_computed[row] for item in live.request.media)

    def _unforked_ids(self) -> set[str]:
        """Requests whose branches are not all on rows: there is too little of them to be worth parking."""
        return {live.request_id for live in self._incomplete()}

    def _num_held_blocks(self, rows: list[int]) -> int:
        return len(set(np.concatenate([np.concatenate(self.table.tables(row)) for row in rows]).tolist()))

    def _park(self, victim: LiveRequest, rows: list[int]) -> None:
        self.swap.swap_out([branch for branch in victim.branches if branch.row >= 0])
        for branch in victim.branches:
            if branch.row >= 0:
                self.leave_row(branch)
                branch.status = RequestStatus.SWAPPED
        victim.status = RequestStatus.SWAPPED
        self.counters.swap_outs += 1
        self.swapped.push(victim)

    def _drop(self, victim: LiveRequest) -> None:
        for branch in victim.branches:
            if branch.row >= 0:
                self.take_row(branch)
            if not branch.is_finished:
                branch.num_computed = 0
                branch.status = RequestStatus.PREEMPTED
        victim.status = RequestStatus.PREEMPTED
        victim.line_key = self.policy.key_on_return(victim)
        self.waiting.push(victim)

    def _return_encoder_runs(self, row: int, plan: StepPlan) -> None:
        """Encoder runs planned for a row that was taken out go to another request that waits for them, or nowhere."""
        for run in plan.encoder_runs.pop(row, ()):
            branch = self.table.branch_of[row]
            assert branch is not None
            heir = self.encoder.disinherit(branch.live, run.content_hash)
            heir_row = next((branch.row for branch in self.live[heir].branches if branch.row >= 0), -1) if heir else -1
            if heir is None or heir_row < 0:
                plan.encoder_budget += branch.live.request.media[run.item].length
                continue
            items = self.live[heir].request.media
            item = next(number for number, media in enumerate(items) if media.content_hash == run.content_hash)
            plan.encoder_runs.setdefault(heir_row, []).append(type(run)(heir_row, item, run.content_hash))

    def enter_running(self, live: LiveRequest) -> None:
        """`live` takes its seats; the caller gives rows to its branches."""
        if live.admission < 0:
            live.queue_s = self.clock.now() - live.request.arrival_time_s
        self.num_admissions += 1
        live.admission = self.num_admissions
        live.status = RequestStatus.RUNNING
        self.running[live.request_id] = live
        self.num_seats_taken += len(live.unfinished)
        self.lora_gate.enter(live)

    def _leave_running(self, live: LiveRequest) -> None:
        del self.running[live.request_id]
        self.num_seats_taken -= len(live.unfinished)
        self.lora_gate.leave(live)

    # The end

    def end_branch(
        self, branch: Branch, status: RequestStatus, stop_reason: int | None = None, message: str | None = None
    ) -> Finish:
        """The branch has ended; with the last one, the request. What it held is free at once."""
        live = branch.live
        if live.request_id in self.running:
            self.num_seats_taken -= 1
        branch.status = status
        if branch.row >= 0:
            self.take_row(branch)
        elif branch.host_blocks:
            self.swap.drop(branch)
        done = not live.unfinished
        if done:
            self._remove(live, status)
        return Finish(
            live.request_id,
            live.request.handle,
            branch.index,
            status,
            stop_reason,
            done,
            message,
            live.num_preemptions,
        )

    def _remove(self, live: LiveRequest, status: RequestStatus) -> None:
        """Nothing of the request is left in any queue."""
        if live.request_id in self.running:
            self._leave_running(live)
        elif live.request_id in self.swapped:
            self.swapped.remove(live)
        elif live.request_id in self.waiting:
            self.waiting.remove(live)
        live.status = status
        self.encoder.drop_all(live)
        del self.live[live.request_id]
        self.finished_ids.append(live.request_id)

    def end_one_branch(self, branch: Branch, status: RequestStatus, message: str | None = None) -> Finish:
        """`end_branch` for one that others may need: if they wait for its row, the request starts again without it."""
        live = branch.live
        if (branch.row in self.forking or branch.row in self.joining) and len(live.unfinished) > 1:
            self._drop(live)
            self._leave_running(live)
        return self.end_branch(branch, status, message=message)

    def drop_running(self) -> None:
        """Throw everybody out, newest first, so that the line keeps their order. What is in flight is lost."""
        for live in reversed(list(self.running.values())):
            rows = [branch.row for branch in live.branches if branch.row >= 0]
            self._drop(live)
            self._leave_running(live)
            self.encoder.drop_all(live)
            live.num_preemptions += 1
            self.counters.preemptions += 1
            self.preempted_by_reset.append(live.request_id)
            for row in rows:
                self.table.disown(row)
            for branch in live.branches:
                branch.in_flight_steps.clear()

    def end_request(self, live: LiveRequest, status: RequestStatus, message: str | None = None) -> list[Finish]:
        """All branches that still run end together."""
        for row in [branch.row for branch in live.branches if branch.row >= 0]:
            self.forking.pop(row, None)
            self.joining.pop(row, None)
        return [self.end_branch(branch, status, message=message) for branch in live.unfinished]

    def warn_ignored(self, live: LiveRequest, why: str) -> None:
        logger.warning("request %s is ignored: it %s", live.request_id, why)

    def tell_later(self, live: LiveRequest, finishes: list[Finish]) -> None:
        """Ends decided while planning: for the SchedulerOutput, and for the client at the next chance."""
        self.ended_in_planning.extend(finishes)
        self.untold.setdefault(live.request.client_index, []).extend(finishes)

    def take_untold(self) -> dict[int, EngineCoreOutputs]:
        untold, self.untold = self.untold, {}
        return {client: only_finishes(finishes) for client, finishes in untold.items()}


def only_finishes(finishes: Iterable[Finish]) -> EngineCoreOutputs:
    """Ends without tokens."""
    none = np.empty(0, np.int32)
    return EngineCoreOutputs(NO_HANDLES, none, none, none, tuple(finishes))
