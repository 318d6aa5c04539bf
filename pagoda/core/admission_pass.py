"""AdmissionPass: who enters the running set from the waiting line."""

import numpy as np

from pagoda.base.config import SchedulingMode, SchedulingPolicy
from pagoda.core.decision_log import Reason
from pagoda.core.encoder_budget import MediaFit, fit_media
from pagoda.core.entry_checks import EntryChecks, Verdict
from pagoda.core.kv_content import Hit
from pagoda.core.kv_groups import blocks_for
from pagoda.core.request import LoraRef, RequestStatus
from pagoda.core.request_table import Branch, LiveRequest
from pagoda.core.scheduler_output import AdmitKind
from pagoda.core.scheduler_state import SchedulerState
from pagoda.core.step_plan import Entry, StepPlan


class AdmissionPass:
    """Asks each request in line order until one has to wait: nobody overtakes, but for those that a gate holds back."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._checks = EntryChecks(state)

    def run(self, plan: StepPlan) -> None:
        """Admit in line order while there are seats, blocks and budget."""
        state = self._state
        if not state.waiting:
            return
        state.register_filled(plan)
        closed: set[LoraRef] = set()
        aside: list[LiveRequest] = []
        while plan.budget > 0 and (live := state.waiting.head(closed)) is not None:
            if live.request.lora is not None and state.lora_gate.refusal(live):
                self._checks.hold(live, Reason.LORA, stops_line=False)
                closed.add(live.request.lora)
                continue
            refusal = next((reason for gate in state.gates if (reason := gate.refusal(live))), None)
            if refusal is not None:
                self._checks.hold(live, refusal, stops_line=False)
                state.waiting.remove(live)
                aside.append(live)
                continue
            reason = self._line_stops_for(live, plan) or self._admit(live, plan)
            if reason is None:
                continue
            if self._make_way(live, reason, plan):
                continue
            self._checks.hold(live, reason)
            break
        for live in aside:
            state.waiting.push(live)

    def _line_stops_for(self, live: LiveRequest, plan: StepPlan) -> Reason | None:
        """Limits that do not depend on the request's blocks."""
        state = self._state
        if not self._checks.has_seats(live):
            return Reason.SEATS
        if state.running and state.delay_gate.is_closed(state.waiting.oldest_arrival_s(), plan.now_s):
            return Reason.DELAY
        limit = state.config.max_num_partial_prefills
        if limit and self._num_partial_prefills(plan) >= limit:
            return Reason.PARTIAL_PREFILLS
        return None

    def _num_partial_prefills(self, plan: StepPlan) -> int:
        """Rows that will still be mid-prefill after this step."""
        state, table = self._state, self._state.table
        rows, start, num_new = plan.arrays()
        ends = table.num_computed.copy()
        ends[rows] = start + num_new
        rows = state.lineup.rows
        # A resumed row that lacks only its last output token is a decode again.
        prefill_end = np.maximum(table.num_prompt_tokens[rows], table.num_tokens[rows] - 1)
        return int(np.count_nonzero(ends[rows] < prefill_end))

    def _admit(self, live: LiveRequest, plan: StepPlan) -> Reason | None:
        """Let the head of the line in, or end it, or say why it waits. Nothing is taken before all checks pass."""
        state = self._state
        leader = live.unfinished[0]
        num_tokens = len(leader.token_ids)
        if self._never_fits(live, num_tokens):
            return None
        sampling = live.request.sampling
        asks_prompt_logprobs = sampling is not None and sampling.prompt_logprobs is not None
        # Branches that come back share the first one's blocks, which a window hit may not have all.
        shares_behind_window = bool(state.kv.windows) and len(live.unfinished) > 1 and not live.awaiting_fork
        skip = live.request.skip_prefix_read or asks_prompt_logprobs or shares_behind_window
        hit = state.kv.content.no_hit if skip else state.kv.content.lookup(leader)
        num_new = num_tokens - hit.num_tokens
        if plan.prompt_cap:
            num_new = min(num_new, plan.prompt_cap)
        if num_new > plan.budget:
            if not self._may_chunk(live, num_tokens):
                return Reason.BUDGET
            num_new = plan.budget
        media = None
        if live.request.media:
            media = fit_media(state, plan, live, hit.num_tokens, num_new)
            num_new = media.num_new
            if num_new == 0:
                state.encoder.drop_all(live)
                return Reason.ENCODER
        verdict, reason = self._verdict(live, num_tokens, num_new, hit)
        if verdict is not Verdict.OK:
            state.encoder.drop_all(live)
            if verdict is Verdict.LATER:
                return reason
            self._checks.refuse(live, "needs more KV blocks than there are")
            return None
        self._enter(live, leader, hit, num_new, media, plan)
        return None

    def _may_chunk(self, live: LiveRequest, num_tokens: int) -> bool:
        """Prompts are cut in mixed mode only; but a phased engine must cut what outgrew a step while it was away."""
        config = self._state.config
        if config.scheduling_mode is SchedulingMode.MIXED:
            return config.enable_chunked_prefill
        return live.num_preemptions > 0 and num_tokens > config.max_num_batched_tokens

    def _never_fits(self, live: LiveRequest, num_tokens: int) -> bool:
        """End a request that can never be served: too long for a phased step, for the seats or for the pool."""
        state, config = self._state, self._state.config
        need = state.kv.blocks_when_alone(num_tokens, live.request.encoder_len) + self._num_sibling_blocks(live)
        if need > state.kv.pool.num_blocks:
            self._checks.refuse(live, f"needs {need} KV blocks of the {state.kv.pool.num_blocks} there are")
        elif len(live.unfinished) > config.max_num_seqs:
            self._checks.refuse(
                live, f"asks for {len(live.unfinished)} sequences at once, max_num_seqs is {config.max_num_seqs}"
            )
        elif (
            num_tokens > config.max_num_batched_tokens
            and config.scheduling_mode is SchedulingMode.PHASED
            and not self._may_chunk(live, num_tokens)
        ):
            limit = config.max_num_batched_tokens
            self._checks.refuse(live, f"has {num_tokens} tokens; a phased step takes {limit} (max_num_batched_tokens)")
        else:
            return False
        return True

    def _verdict(self, live: LiveRequest, num_tokens: int, num_new: int, hit: Hit) -> tuple[Verdict, Reason]:
        """Whether the blocks are there: for all known tokens (a check, not a hold), and for this chunk."""
        state, encoder_len = self._state, live.request.encoder_len
        end = min(hit.num_tokens + num_new + state.config.num_lookahead_slots, state.max_model_len)
        need = state.kv.blocks_to_admit(end, hit, encoder_len)
        if state.config.admit_whole_prompt:
            need = max(need, self._blocks_for_all(live, num_tokens, hit))
        return self._checks.against_free(need)

    def _blocks_for_all(self, live: LiveRequest, num_tokens: int, hit: Hit) -> int:
        kv = self._state.kv
        return kv.blocks_to_admit(num_tokens, hit, live.request.encoder_len, capped=True) + self._num_sibling_blocks(
            live
        )

    def _num_sibling_blocks(self, live: LiveRequest) -> int:
        """Blocks of branches that come back beside the first one, behind the full prompt blocks that all share."""
        if live.awaiting_fork:
            return 0
        kv = self._state.kv
        shared = live.request.num_prompt_tokens // kv.block_size
        return sum(
            (blocks_for(len(branch.token_ids), kv.block_size) - shared) * len(kv.growing)
            for branch in live.unfinished[1:]
        )

    def _enter(
        self, live: LiveRequest, leader: Branch, hit: Hit, num_new: int, media: MediaFit | None, plan: StepPlan
    ) -> None:
        """All checks passed: take the seat, the row and the blocks."""
        state = self._state
        state.waiting.remove(live)
        resumed = live.status is RequestStatus.PREEMPTED
        state.enter_running(live)
        start = hit.num_tokens
        row = state.give_row(leader, start)
        leader.status = RequestStatus.RUNNING
        state.kv.place(row, hit, start + num_new, live.request.encoder_len)
        state.kv.content.register(row, start + num_new)
        plan.entries[row] = Entry(row, AdmitKind.RESUMED if resumed else AdmitKind.NEW, start)
        plan.place(row, start, num_new)
        plan.num_prompts += 1
        if media:
            media.commit(state, plan, row)
        if live.request.media:
            state.media_rows[row] = live
        if len(live.unfinished) > 1:
            (state.forking if live.awaiting_fork else state.joining)[row] = live
        if not live.has_spoken:
            state.silent[row] = live
        self._count_prefix(live, start, resumed)
        self._checks.note_admitted(live, num_new, start)

    def _count_prefix(self, live: LiveRequest, num_cached: int, resumed: bool) -> None:
        counters, num_tokens = self._state.counters, len(live.unfinished[0].token_ids)
        if not resumed:
            live.num_cached_tokens = num_cached
        if not self._state.kv.content.caching:
            return
        if resumed:
            counters.prefix_queries_resumed += num_tokens
            counters.prefix_hits_resumed += num_cached
        else:
            counters.prefix_queries += num_tokens
            counters.prefix_hits += num_cached

    # Eviction for a more urgent newcomer (an option of the priority policy)

    def _make_way(self, head: LiveRequest, reason: Reason, plan: StepPlan) -> bool:
        """Throw out the worst running request if `head` is more urgent; True if that was done."""
        state = self._state
        config = state.config
        if not config.evict_for_priority or config.scheduling_policy is not SchedulingPolicy.PRIORITY:
            return False
        if plan.entries or reason not in (Reason.SEATS, Reason.BLOCKS, Reason.WATERMARK):
            return False  # who entered in this step may count on blocks that a running row fills in it
        if not state.running:
            return False
        worst = state.policy.victim(state.running.values())
        if state.policy.key_on_return(worst) <= head.line_key:
            return False
        state.preempt(worst, plan, head)
        return True
