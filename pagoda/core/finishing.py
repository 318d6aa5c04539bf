"""The step is planned: its counts are advanced, sequences fork and join, and its SchedulerOutput is built."""

import numpy as np

from pagoda.core.lifecycle import give_row
from pagoda.core.request import AdmitKind, RequestState, without_features
from pagoda.core.scheduler_output import NO_TOKENS, RowFork, RowInit, SchedulerOutput
from pagoda.core.state import SchedulerState
from pagoda.core.step_plan import StepPlan


def finish_plan(state: SchedulerState, plan: StepPlan) -> SchedulerOutput:
    """Fill in the second part of the plan. Return the step as workers get it."""
    plan.rows, plan.start, plan.num_new = plan.arrays()
    if plan.is_steady and len(plan.rows) == len(plan.at):  # nothing else was placed
        plan.sample_rows = plan.rows
        state.table.advance(plan.at, plan.ends, plan.num_new)
    else:
        plan.at, plan.ends = plan.rows.astype(np.intp), plan.start + plan.num_new
        state.table.advance(plan.at, plan.ends, plan.num_new)
        # A row samples when its chunk reaches the end of its known tokens.
        reaches = (plan.ends >= state.table.num_known(plan.at)) & ~state.table.is_pooled[plan.at]
        plan.sample_index = reaches.nonzero()[0].astype(np.int32)
        plan.sample_rows = plan.rows[plan.sample_index]
        has_entered = any(kind is not AdmitKind.SWAPPED_IN for kind, _ in plan.entering.values())
        _fork_and_join(state, plan)
        plan.has_prompts = state.batch.note_progress(plan) or has_entered
    state.table.expect_tokens(plan.sample_rows, plan.drafts)
    return _build_output(state, plan)


def _fork_and_join(state: SchedulerState, plan: StepPlan) -> None:
    """Fork the sequences of new requests, then let those of resumed ones join."""
    leaders = list(state.batch.leaders.items())
    for row, request in leaders:
        if request.awaiting_fork and state.table.num_computed[row] >= state.table.num_tokens[row]:
            _fork(state, plan, row, request)
    for row, request in leaders:
        if row in state.batch.leaders and not request.awaiting_fork:
            if all(sequence.row >= 0 for sequence in request.unfinished):
                state.batch.release_siblings(row)  # those that waited for it have ended
                continue
            shared = _num_shared_tokens(state, request)
            if state.table.num_computed[row] >= shared:
                _join(state, plan, row, request, shared)


def _fork(state: SchedulerState, plan: StepPlan, source: int, request: RequestState) -> None:
    """The prompt is complete: the other sequences share its blocks, and sample from the same logits."""
    state.batch.release_siblings(source)
    request.awaiting_fork = False
    first = state.table.owner(source)
    forks: list[RowFork] = []
    for sequence in request.unfinished:
        if sequence is first:
            continue
        num_computed = int(state.table.num_computed[source])
        row = give_row(state, sequence, num_computed, source)
        state.kv.tables.fork(source, row, num_computed)
        forks.append(RowFork(source, row, sequence.index, sequence.seed))
    where = int(np.flatnonzero(plan.rows == source)[0])
    plan.forks += forks
    plan.sample_rows = np.concatenate((plan.sample_rows, np.array([fork.dst for fork in forks], np.int32)))
    plan.sample_index = np.concatenate((plan.sample_index, np.full(len(forks), where, np.int32)))


def _num_shared_tokens(state: SchedulerState, request: RequestState) -> int:
    """Tokens in the full prompt blocks that the sequences of a resumed request share.

    One token at least is left to compute: sequences may have lost their first one in flight, to a cache reset. States
    are there before the prompt's last token (`KVSizing.snapshots_of`).
    """
    known = min(len(sequence.token_ids) for sequence in request.unfinished if sequence.row < 0)
    size, num_prompt = state.kv.sizing.block_size, request.spec.num_prompt_tokens - state.kv.sizing.has_states
    return min(num_prompt, known - 1) // size * size


def _join(state: SchedulerState, plan: StepPlan, leader: int, request: RequestState, shared: int) -> None:
    """The resumed first sequence has the full prompt blocks again: the others share them, and compute the rest."""
    state.batch.release_siblings(leader)
    for sequence in request.unfinished:
        if sequence.row == leader:
            continue
        row = give_row(state, sequence, shared)
        state.kv.tables.fork(leader, row, shared)
        plan.entering[row] = AdmitKind.RESUMED, shared
        state.encoder.add_row(request, row)
        state.batch.start_prefill(row)


def _build_output(state: SchedulerState, plan: StepPlan) -> SchedulerOutput:
    """Return the step with what its owners have noted for workers since the last one."""
    kv = state.kv
    block_delta, copies = kv.tables.take_changes()
    swap_out, swap_in = kv.host.take_moves()
    preempted, finished = state.take_notices()
    admitted = [_row_init(state, row, *entry) for row, entry in plan.entering.items()] if plan.entering else ()
    runs = [run for of_row in plan.encoder_runs.values() for run in of_row] if plan.encoder_runs else ()
    return SchedulerOutput(
        plan.step,
        plan.rows,
        plan.start,
        plan.num_new,
        plan.sample_rows,
        plan.sample_index,
        plan.num_scheduled,
        admitted=tuple(admitted),
        decided=state.table.report_tokens(plan.at) if state.config.has_followers else NO_TOKENS,
        beams=state.take_beams(),
        forks=tuple(plan.forks),
        released=state.table.take_released(),
        block_delta=block_delta,
        swap_out=swap_out,
        swap_in=swap_in,
        copies=copies,
        drafts=plan.drafts,
        encoder_runs=tuple(runs),
        encoder_freed=state.encoder.cache.take_evicted(),
        encoder_inputs=state.encoder.take_inputs(runs),
        preempted=preempted,
        finished=finished,
    )


def _row_init(state: SchedulerState, row: int, kind: AdmitKind, num_computed: int) -> RowInit:
    sequence = state.table.owner(row)
    spec = sequence.request.spec
    return RowInit(
        row=row,
        request_id=spec.request_id,
        sequence=sequence.index,
        kind=kind,
        token_ids=sequence.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        num_computed=num_computed,
        block_ids=state.kv.tables.of(row),
        seed=sequence.seed,
        eos_token_ids=spec.eos_token_ids,
        sampling=spec.sampling,
        pooling=spec.pooling,
        lora=spec.lora,
        media=tuple(map(without_features, spec.media)),
        encoder_len=spec.encoder_len,
        cache_salt=spec.cache_salt,
        prompt_embeds=spec.prompt_embeds,
        key=spec.key,
    )
