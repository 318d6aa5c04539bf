"""emit: turn a finished plan into the SchedulerOutput, and advance the counts by what was planned."""

import numpy as np

from pagoda.core.decision_log import Copied
from pagoda.core.request import RequestStatus
from pagoda.core.scheduler_output import NO_INTS, AdmitKind, Finish, RowFork, RowInit, SchedulerOutput
from pagoda.core.scheduler_state import SchedulerState
from pagoda.core.step_plan import Entry, StepPlan


def emit(state: SchedulerState, plan: StepPlan) -> SchedulerOutput:
    """The step as workers get it. `num_computed` rises here, so that the next step can be planned at once."""
    table = state.table
    rows, start, num_new = plan.arrays()
    ends = start + num_new
    table.num_computed[rows] = ends
    if state.kv.windows:
        table.num_in_flight[rows] += num_new
    forks: tuple[RowFork, ...] = ()
    if plan.steady and not plan.placed:
        lineup = state.lineup
        sample_rows, sample_index = lineup.rows, lineup.numbers
    else:
        sample_rows, sample_index = _sampling(state, rows, ends)
        if state.forking:
            forks, sample_rows, sample_index = _fork(state, rows, sample_rows, sample_index)
        if state.joining:
            _join(state, plan)
        _note_progress(state, plan, rows, ends, sample_rows)
    if state.config.async_scheduling:
        _note_pending(state, plan, sample_rows)
    if state.log.enabled:
        _note_copies(state)
    delta, copies, swap_out, swap_in = state.kv.moves.drain()
    output = SchedulerOutput(
        step=plan.step,
        rows=rows,
        start=start,
        num_new=num_new,
        sample_rows=sample_rows,
        sample_index=sample_index,
        total_num_scheduled_tokens=plan.num_scheduled,
        admitted=_row_inits(state, plan) if plan.entries else (),
        forks=forks,
        released=_take_released(state),
        block_delta=delta,
        swap_out=swap_out,
        swap_in=swap_in,
        copies=copies,
        drafts=plan.drafts,
        encoder_runs=tuple(run for runs in plan.encoder_runs.values() for run in runs) if plan.encoder_runs else (),
        encoder_freed=state.encoder.take_evicted(),
        num_common_prefix_blocks=state.lineup.num_common_prefix_blocks,
        num_lookahead_slots=state.config.num_lookahead_slots,
        running_queue_size=len(state.running),
        preempted_ids=_take_preempted(state, plan),
        finished_ids=_take_finished(state),
        ignored=_take_ignored(state),
    )
    if len(rows):
        state.in_flight.append(output)
        if plan.num_prompts:
            state.prompt_steps[plan.step] = plan.now_s
    return output


def _sampling(state: SchedulerState, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that this step brings to the end of what is known of them, and where they stand in `rows`."""
    table = state.table
    reaches = (ends >= table.num_tokens[rows] + table.num_pending[rows]) & ~table.is_pooled[rows]
    index = np.flatnonzero(reaches).astype(np.int32)
    return rows[index], index


def _note_progress(
    state: SchedulerState, plan: StepPlan, rows: np.ndarray, ends: np.ndarray, sample_rows: np.ndarray
) -> None:
    """Keep the exceptions from "one more token each" up to date."""
    table = state.table
    for row in rows[ends < table.num_tokens[rows]].tolist():
        state.prefilling[row] = None
        plan.num_prompts += 1
    if state.prefilling:
        for row in state.prefilling.keys() & set(rows[ends >= table.num_tokens[rows]].tolist()):
            del state.prefilling[row]
            plan.num_prompts += 1
    state.steady = len(sample_rows) == len(state.lineup.rows) and not plan.drafts and not state.joining
    state.quiet_steps = -1


def _note_pending(state: SchedulerState, plan: StepPlan, sample_rows: np.ndarray) -> None:
    """Planned tokens count as known, but not behind drafts: where the row goes on depends on how many are accepted."""
    if plan.drafts:
        sample_rows = sample_rows[~np.isin(sample_rows, np.fromiter(plan.drafts, np.int32, len(plan.drafts)))]
    state.table.num_pending[sample_rows] += 1


def _fork(
    state: SchedulerState, rows: np.ndarray, sample_rows: np.ndarray, sample_index: np.ndarray
) -> tuple[tuple[RowFork, ...], np.ndarray, np.ndarray]:
    """Prompts that are complete with this step get their other branches, which sample from the same logits."""
    table = state.table
    forks: list[RowFork] = []
    index: list[int] = []
    for source, live in list(state.forking.items()):
        if table.num_computed[source] < table.num_tokens[source]:
            continue
        del state.forking[source]
        live.awaiting_fork = False
        where = int(np.flatnonzero(rows == source)[0])
        for branch in live.unfinished:
            if branch.row == source:
                continue
            first = table.branch_of[source]
            assert first is not None
            branch.chain = first.chain.fork() if first.chain else None
            branch.status = RequestStatus.RUNNING
            row = table.fork(source, branch)
            state.kv.share(source, row, int(table.num_computed[source]))
            forks.append(RowFork(source, row, branch.index, branch.seed))
            index.append(where)
    if forks:
        state.running_set_changed()
        sample_rows = np.concatenate((sample_rows, np.array([fork.dst for fork in forks], np.int32)))
        sample_index = np.concatenate((sample_index, np.array(index, np.int32)))
    return tuple(forks), sample_rows, sample_index


def _join(state: SchedulerState, plan: StepPlan) -> None:
    """Resumed requests whose first branch has the full prompt blocks again: the others get rows, sharing those."""
    table, kv = state.table, state.kv
    for leader, live in list(state.joining.items()):
        prompt_blocks = live.request.num_prompt_tokens // kv.block_size
        if table.num_computed[leader] < prompt_blocks * kv.block_size:
            continue
        del state.joining[leader]
        for branch in live.unfinished:
            if branch.row == leader:
                continue
            # One token at least is left to compute: a branch may have lost its first one in flight, to a cache reset.
            shared = min(prompt_blocks, (len(branch.token_ids) - 1) // kv.block_size) * kv.block_size
            row = state.give_row(branch, shared)
            branch.status = RequestStatus.RUNNING
            kv.share(leader, row, shared)
            plan.entries[row] = Entry(row, AdmitKind.RESUMED, shared)
            state.prefilling[row] = None
            if live.request.media and not state.encoder_decoder:  # shared cross-attention blocks are filled already
                state.media_rows[row] = live


def _row_inits(state: SchedulerState, plan: StepPlan) -> tuple[RowInit, ...]:
    """Entries in the order they were made; those that were taken out again are gone."""
    return tuple(_row_init(state, entry) for entry in plan.entries.values())


def _row_init(state: SchedulerState, entry: Entry) -> RowInit:
    branch = state.table.branch_of[entry.row]
    assert branch is not None
    request = branch.live.request
    return RowInit(
        row=entry.row,
        request_id=request.request_id,
        branch=branch.index,
        kind=entry.kind,
        token_ids=branch.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed=entry.num_computed,
        block_ids=state.table.tables(entry.row),
        seed=branch.seed,
        eos_token_ids=request.eos_token_ids,
        sampling=request.sampling,
        pooling=request.pooling,
        lora=request.lora,
        media=request.media,
        encoder_len=request.encoder_len,
    )


def _note_copies(state: SchedulerState) -> None:
    for row, source, target in state.kv.moves.copies:
        branch = state.table.branch_of[row]
        assert branch is not None
        state.log.note(Copied(branch.live.request_id, branch.index, source, target))


def _take_released(state: SchedulerState) -> np.ndarray:
    if not state.released_rows:
        return NO_INTS
    released, state.released_rows = np.array(state.released_rows, np.int32), []
    return released


def _take_finished(state: SchedulerState) -> tuple[str, ...]:
    if not state.finished_ids:
        return ()
    finished, state.finished_ids = tuple(state.finished_ids), []
    return finished


def _take_preempted(state: SchedulerState, plan: StepPlan) -> tuple[str, ...]:
    """Those of this step, and those that a cache reset threw out since the last one."""
    if not plan.preempted and not state.preempted_by_reset:
        return ()
    by_reset, state.preempted_by_reset = state.preempted_by_reset, []
    return (*by_reset, *(live.request_id for live in plan.preempted))


def _take_ignored(state: SchedulerState) -> tuple[Finish, ...]:
    if not state.ended_in_planning:
        return ()
    ignored, state.ended_in_planning = tuple(state.ended_in_planning), []
    return ignored
