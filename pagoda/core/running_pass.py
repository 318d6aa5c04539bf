"""RunningPass: continue what runs. Whole batches by numpy; row by row when memory is short or media may be encoded."""

import numpy as np

from pagoda.core.encoder_budget import fit_media
from pagoda.core.request import RequestStatus
from pagoda.core.request_table import Branch, LiveRequest
from pagoda.core.scheduler_state import SchedulerState
from pagoda.core.step_plan import StepPlan


class RunningPass:
    """Gives every running row, in order of admission, what it lacks, as far as budget and blocks go."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def run(self, plan: StepPlan) -> None:
        state = self._state
        if not state.running:
            return
        if state.steady and self._run_steady(plan):
            return
        if state.media_rows or not self._run_batch(plan):
            self._run_row_by_row(plan)

    # The event-free step

    def _run_steady(self, plan: StepPlan) -> bool:
        """One more token for every row: True where that is the whole truth about this step."""
        state, table = self._state, self._state.table
        lineup = state.lineup
        rows = lineup.rows
        count = len(rows)
        if count > plan.budget or (state.in_flight and not state.config.async_scheduling):
            return False
        start = table.num_computed[rows]
        if state.quiet_steps > 0:
            state.quiet_steps -= 1
        else:
            ends = start + 1
            if state.config.async_scheduling and (ends >= table.length_limit[rows]).any():
                return False  # the token in flight ends a row: it must not be planned further
            spare = table.attention_at[rows] - ends
            needy = spare < 0
            if needy.any() and not self._grow(rows[needy], ends[needy]):
                return False
            state.quiet_steps = self._count_quiet_steps(rows, ends)
        plan.bulk_rows, plan.bulk_start, plan.bulk_new = rows, start, lineup.ones
        plan.budget -= count
        plan.steady = True
        return True

    def _count_quiet_steps(self, rows: np.ndarray, ends: np.ndarray) -> int:
        """How many more steps of one token each surely need no block and, planned ahead, reach no length limit."""
        table = self._state.table
        quiet = int((table.attention_at[rows] - ends).min())
        if self._state.config.async_scheduling:
            quiet = min(quiet, int((table.length_limit[rows] - ends).min()) - 1)
        return quiet

    def _grow(self, rows: np.ndarray, ends: np.ndarray) -> bool:
        """Blocks for `rows`, unless there might be too few of them: then nothing is done."""
        kv = self._state.kv
        if kv.blocks_to_grow(rows, ends) > kv.pool.num_free:
            return False
        kv.grow(rows, ends)
        return True

    # Any mixture of chunks, decodes and drafts, while memory lasts

    def _run_batch(self, plan: StepPlan) -> bool:
        """`_run_row_by_row` in one go: equal where nobody has to be preempted. Elsewhere False, and nothing done."""
        state, table = self._state, self._state.table
        state.quiet_steps = -1
        rows = state.lineup.rows
        start = table.num_computed[rows]
        want = self._wanted(plan, rows, start)
        taken = np.cumsum(want)
        if taken[-1] > plan.budget:  # whoever comes first takes what it wants; the last one served takes the rest
            want = np.clip(plan.budget - (taken - want), 0, want)
        runs = want > 0
        if not runs.all():
            rows, start, want = rows[runs], start[runs], want[runs]
        ends = start + want
        needy = ends > table.attention_at[rows]
        if needy.any() and not self._grow(rows[needy], ends[needy]):
            return False
        plan.bulk_rows, plan.bulk_start, plan.bulk_new = rows, start, want
        plan.budget -= int(want.sum())
        if state.drafts:
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                if row in state.drafts:
                    self._place_drafts(plan, row, end)
        return True

    def _wanted(self, plan: StepPlan, rows: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Tokens each row lacks, drafts included, under the long-prompt cap; int32 [num_rows]."""
        state, table = self._state, self._state.table
        known = table.num_tokens[rows] + table.num_pending[rows]
        end = known
        if state.drafts:
            end = known + table.num_drafts[rows]
        if state.drafts or state.config.async_scheduling:
            # The token at the model's last position is sampled, never computed.
            end = np.minimum(end, np.maximum(table.num_tokens[rows], state.max_model_len - 1))
            ends_in_flight = (table.num_pending[rows] > 0) & (known >= table.length_limit[rows])
            end = np.where(ends_in_flight, start, end)
        want = np.maximum(end - start, 0)
        return np.minimum(want, plan.prompt_cap) if plan.prompt_cap else want

    def _place_drafts(self, plan: StepPlan, row: int, end: int) -> None:
        """Those drafts of the row that fit before `end`; the others are gone."""
        table = self._state.table
        drafts = self._state.drop_drafts(row)
        assert drafts is not None
        count = end - int(table.num_tokens[row] + table.num_pending[row])
        if count > 0:
            plan.drafts[row] = drafts[:count]

    # The definition

    def _run_row_by_row(self, plan: StepPlan) -> None:
        """The same, one row after the other. Who finds no block preempts, until it fits or is its own victim."""
        state = self._state
        state.quiet_steps = -1
        for live in list(state.running.values()):
            if live.request_id not in state.running:
                continue
            for branch in live.branches:
                if branch.row >= 0 and not self._place_row(plan, live, branch):
                    break

    def _place_row(self, plan: StepPlan, live: LiveRequest, branch: Branch) -> bool:
        """False when `live` does not run any more."""
        state, table, row = self._state, self._state.table, branch.row
        one = np.array([row])
        start = int(table.num_computed[row])
        want = min(int(self._wanted(plan, one, table.num_computed[one])[0]), plan.budget)
        media = fit_media(state, plan, live, start, want) if row in state.media_rows and want else None
        if media:
            want = media.num_new
        if want <= 0:
            return True
        end = start + want
        while not state.kv.grow_one(row, end):
            if self._outgrew_pool(live, row, end):
                message = f"the KV cache has {state.kv.pool.num_blocks} blocks: too few for this request to go on"
                state.tell_later(live, [state.end_one_branch(branch, RequestStatus.FINISHED_LENGTH_CAPPED, message)])
                return live.request_id in state.running
            victim = state.policy.victim(state.running.values())
            state.preempt(victim, plan, live)
            if victim is live:
                return False
        plan.place(row, start, want)
        if row in state.drafts:
            self._place_drafts(plan, row, end)
        if media:
            media.commit(state, plan, row)
        return True

    def _outgrew_pool(self, live: LiveRequest, row: int, end: int) -> bool:
        """No preemption can help: even alone, and without its drafts, the row could not go on."""
        state = self._state
        must_end = min(end, int(state.table.num_tokens[row] + state.table.num_pending[row]))
        if state.kv.blocks_when_alone(must_end, live.request.encoder_len) > state.kv.pool.num_blocks:
            return True
        return len(state.running) == 1 and len(live.unfinished) > 1 and must_end == end
