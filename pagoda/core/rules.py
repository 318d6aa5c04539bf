"""Rules of a step: what holds a request back, and what shortens the chunk that a row computes.

All are ordered functions: to add a rule, add a branch at its place. The first rule that says no gives the reason.
"""

import numpy as np

from pagoda.core.decision_log import Reason
from pagoda.core.policy import RequestQueue
from pagoda.core.request import RequestState, RequestStatus
from pagoda.core.state import SchedulerState
from pagoda.core.step_plan import Chunk, StepPlan

# What holds a request back


def why_skipped(state: SchedulerState, request: RequestState, queue: RequestQueue) -> Reason | None:
    """Return why the first request of `queue` is passed over in this step, or None.

    It keeps its place, and those after it may enter; with Reason.LORA, only those with another adapter or none. Raises
    RequestError if it cannot have what it needs.
    """
    config, lora = state.config, request.spec.lora
    if config.max_loras and lora is not None and not state.batch.has_room_for_adapter(lora, config.max_loras):
        return Reason.LORA
    if state.in_flight.has_late_tokens(request):  # they would be sampled twice; a swapped one stops its queue
        return Reason.IN_FLIGHT if queue is state.waiting else None
    return state.preparations.why_not_ready(request.spec) if state.preparations is not None else None


def why_stopped(state: SchedulerState, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Reason | None:
    """Return why neither the first request of `queue`, which is not skipped, nor any after it enters, or None."""
    if state.in_flight.has_late_tokens(request):
        return Reason.IN_FLIGHT
    if not _has_room_for_sequences(state, len(request.unfinished)):
        return Reason.NUM_SEQS
    if queue is state.waiting:
        if state.config.scheduler_delay_factor and _lets_prompts_gather(state, plan):
            return Reason.DELAY
        most = state.config.max_num_partial_prefills
        if most and _num_partial_prefills(state, plan) >= most:
            return Reason.PARTIAL_PREFILLS
    return None


def why_never(state: SchedulerState, request: RequestState) -> str | None:
    """Return why a waiting request can never be served: too many blocks or sequences, or too long for a step."""
    config, num_blocks, num_prompt = state.config, state.kv.num_blocks, request.spec.num_prompt_tokens
    need, num_seqs, longest = state.kv.most_blocks(request), len(request.unfinished), config.max_num_batched_tokens
    if need > num_blocks:
        return f"needs {need} KV blocks of the {num_blocks} there are"
    if num_seqs > config.max_num_seqs:
        return f"asks for {num_seqs} sequences at once, max_num_seqs is {config.max_num_seqs}"
    if state.is_phased and num_prompt > longest:
        return f"has {num_prompt} tokens; a phased step takes {longest} (max_num_batched_tokens)"
    return None


def _has_room_for_sequences(state: SchedulerState, count: int) -> bool:
    """Whether `count` more sequences may run: at most `max_num_seqs`, and each has a row."""
    batch, table = state.batch, state.table
    num_without_row = batch.num_seqs - table.num_active_rows
    return batch.num_seqs + count <= state.config.max_num_seqs and table.num_free_rows >= num_without_row + count


def _lets_prompts_gather(state: SchedulerState, plan: StepPlan) -> bool:
    """Whether waiting requests still wait, while something runs, for more prompts to enter together."""
    delay_s = state.config.scheduler_delay_factor * state.in_flight.last_prompt_step_s
    return bool(state.batch.requests) and plan.now_s - state.waiting.oldest_arrival_s() <= delay_s


def _num_partial_prefills(state: SchedulerState, plan: StepPlan) -> int:
    """Return how many prompts are incomplete after this step, as planned so far."""
    table, rows = state.table, state.batch.running.rows
    ends = plan.ends_of(table.num_computed)[rows]
    # A resumed row that lacks only its last output token is a decode again.
    return int(np.count_nonzero(ends < np.maximum(table.num_prompt_tokens[rows], table.num_tokens[rows] - 1)))


# What shortens a chunk


def narrow_budgets(state: SchedulerState, plan: StepPlan) -> None:
    """Lower the budgets of a step that is opened, as far as the settings for stages and for long prompts say.

    A prompt that is alone delays no other, and is not capped.
    """
    config = state.config
    if config.num_stages > 1:
        plan.most_decodes = -(-len(state.batch.running.rows) // config.num_stages)
    if not state.cuts_prompts:
        return
    if config.long_prefill_token_threshold and len(state.requests) > 1:
        plan.row_cap = config.long_prefill_token_threshold
    if config.prefill_beside_decodes:
        num_decodes = len(state.batch.running.rows) - len(state.batch.prefilling)
        if num_decodes:
            share, num_drafts = config.prefill_beside_decodes, int(state.drafts.num_offered.sum())
            plan.budget = min(plan.budget, num_decodes + num_drafts + share)
            plan.prompt_budget = share


def fit_chunk(
    state: SchedulerState, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int
) -> Chunk:
    """Return how many of `num_new` tokens from `start` may be computed. row: -1 for a request that would enter."""
    if plan.row_cap and num_new > plan.row_cap:
        num_new = min(num_new, _cap_of(state, plan, request, row, start))
    if plan.prompt_budget is not None and not _decodes(state, plan, row):
        num_new = min(num_new, plan.prompt_budget)
    if plan.most_decodes is not None and _decodes(state, plan, row) and len(plan.decodes) >= plan.most_decodes:
        return Chunk(0)
    budget = plan.budget
    if row >= 0 and row in state.batch.prefilling:
        budget -= _num_kept_after(state, plan, row)
    if num_new > budget:
        num_new = budget if _may_cut(state, request, start + num_new) else 0
    if num_new <= 0:
        return Chunk(0)
    return state.encoder.plan_chunk(plan, request, row, start, num_new)


def fit_chunks(state: SchedulerState, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """`fit_chunk` for all running rows, in running order, of which none is placed yet and none needs the encoder."""
    num_new = _within_decodes(state, plan, rows, num_new)
    if plan.row_cap:  # drafts are not capped
        num_new = np.minimum(num_new, np.maximum(plan.row_cap, 1 + state.drafts.num_offered[rows]))
    if plan.prompt_budget is not None:
        num_new, left = num_new.copy(), plan.prompt_budget
        for i in _where_prompts(state, rows):
            num_new[i] = min(int(num_new[i]), left)
            left -= int(num_new[i])
    if num_new.sum() <= plan.budget:
        return num_new
    if state.batch.prefilling:
        num_new = _leave_room(state, plan.budget, rows, num_new)
    # Earlier rows get what they want; the last one served gets the rest.
    return np.clip(plan.budget - (np.cumsum(num_new) - num_new), 0, num_new)


def place_chunk(
    state: SchedulerState, plan: StepPlan, request: RequestState, row: int, start: int, chunk: Chunk
) -> None:
    """The row computes the chunk."""
    plan.place(row, start, chunk.num_new)
    if plan.most_decodes is not None and _decodes(state, plan, row):
        plan.decodes.add(row)
    if plan.prompt_budget is not None and not _decodes(state, plan, row):
        plan.take_prompt_tokens(row, chunk.num_new)
    state.encoder.place(plan, request, row, chunk)


def place_chunks(
    state: SchedulerState, plan: StepPlan, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray
) -> None:
    """`place_chunk` for running rows that `fit_chunks` was asked for."""
    plan.place_bulk(rows, start, num_new, int(num_new.sum()))
    if plan.prompt_budget is not None:
        for i in _where_prompts(state, rows):
            plan.take_prompt_tokens(int(rows[i]), int(num_new[i]))


def _cap_of(state: SchedulerState, plan: StepPlan, request: RequestState, row: int, start: int) -> int:
    """Return the most tokens of one row. Neither its drafts are capped, nor a media item that must stay whole."""
    num_drafts = int(state.drafts.num_offered[row]) if row >= 0 else 0
    media = request.spec.media if state.whole_items else ()
    longest_item = max((item.length for item in media if item.offset + item.length > start), default=0)
    return max(plan.row_cap, 1 + num_drafts, longest_item)


def _decodes(state: SchedulerState, plan: StepPlan, row: int) -> bool:
    """Whether the row was running before this step, and is not in `prefilling`."""
    return row >= 0 and row not in state.batch.prefilling and row not in plan.entering


def _within_decodes(state: SchedulerState, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """Return what running `rows` want with 0 for those that decode after the first `most_decodes`; int32 [num_rows]."""
    if plan.most_decodes is None:
        return num_new
    decodes = (num_new > 0) & ~np.isin(rows, list(state.batch.prefilling))
    return np.where(decodes & (np.cumsum(decodes) > plan.most_decodes), 0, num_new)


def _where_prompts(state: SchedulerState, rows: np.ndarray) -> list[int]:
    """Return where rows that are mid-prompt are in `rows`."""
    prefilling = state.batch.prefilling
    return np.flatnonzero(np.isin(rows, list(prefilling))).tolist() if prefilling else []


def _may_cut(state: SchedulerState, request: RequestState, num_tokens: int) -> bool:
    """Prompts are cut in mixed mode only; but a phased engine must cut what has outgrown a step with its output."""
    if request.status is RequestStatus.RUNNING:
        return True
    return num_tokens > state.config.max_num_batched_tokens if state.is_phased else state.cuts_prompts


# A prompt leaves one token for each decoding row after it that has siblings, so that they run together.


def _leave_room(state: SchedulerState, budget: int, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """Cut the chunks of prompts so that later rows with siblings decode."""
    kept = _kept(state, rows, num_new)
    kept_after, cut = kept.sum() - np.cumsum(kept), num_new.copy()
    for i in _where_prompts(state, rows):
        room = budget - int(cut[:i].sum()) - int(kept_after[i])
        cut[i] = min(max(room, 0), int(num_new[i]))
    return cut


def _num_kept_after(state: SchedulerState, plan: StepPlan, row: int) -> int:
    """Return the tokens that the prompt of `row` leaves."""
    rows = state.batch.running.rows
    wanted = state.drafts.num_wanted(rows, state.table.num_computed[rows])
    kept = _kept(state, rows, _within_decodes(state, plan, rows, wanted))
    return int(kept[int(np.flatnonzero(rows == row)[0]) :].sum())


def _kept(state: SchedulerState, rows: np.ndarray, num_wanted: np.ndarray) -> np.ndarray:
    """Return the running `rows` for which prompts leave a token; bool [num_rows]."""
    return state.table.have_siblings(rows) & ~np.isin(rows, list(state.batch.prefilling)) & (num_wanted > 0)
