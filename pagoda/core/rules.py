"""Rules of a step: what holds a request back, and what shortens the chunk that a row computes.

All are ordered functions: to add a rule, add a branch at its place. The first rule that says no gives the reason.
"""

import numpy as np

from pagoda.core.events import Limited
from pagoda.core.kv import CachedPrefix, KVSizing
from pagoda.core.policy import RequestQueue
from pagoda.core.request import Reason, RequestState
from pagoda.core.state import SchedulerState
from pagoda.core.step_plan import Chunk, StepPlan

# What holds a request back


MAX_ADAPTER_SKIPS = 64
"""Steps in which a request may be skipped for its adapter; after that, no adapter's newcomers pass it."""


_BLOCK_KINDS = "KV blocks", "blocks of recurrent states"

MORE_ROOM = "ask for fewer sequences or tokens, or give the cache more memory (kv_cache_memory)"
"""What helps a request that the pools cannot hold."""


def block_kinds(sizing: KVSizing) -> tuple[str, ...]:
    """Return what errors call the blocks of each pool."""
    return _BLOCK_KINDS[-sizing.num_pools :] if sizing.has_states else _BLOCK_KINDS[:1]


def why_skipped(state: SchedulerState, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Reason | None:
    """Return why the first request of `queue` is passed over in this step, or None.

    It keeps its place, and those after it may enter; with Reason.LORA, only those with another adapter or none. What it
    waits for otherwise wakes it. Raises RequestError if it cannot have what it needs.
    """
    lora = request.spec.lora
    if lora is not None and (plan.closed_to_adapters or not state.batch.has_room_for_adapter(lora)):
        return Reason.LORA
    if state.table.has_late_results(request):  # they would be sampled twice; a swapped one stops its queue
        return Reason.IN_FLIGHT if queue is state.waiting else None
    return state.preparations.why_not_ready(request.spec) if state.preparations is not None else None


def why_stopped(state: SchedulerState, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Reason | None:
    """Return why neither the first request of `queue`, which is not skipped, nor any after it enters, or None."""
    if state.table.has_late_results(request):
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
    config, num_prompt = state.config, request.spec.num_prompt_tokens
    num_seqs, longest = len(request.unfinished), config.max_num_batched_tokens
    kinds = block_kinds(state.kv.sizing)
    for need, there, kind in zip(state.kv.most_blocks(request), state.kv.num_blocks, kinds, strict=True):
        if need > there:
            return f"needs {need} {kind} of the {there} there are; {MORE_ROOM}"
    if num_seqs > config.max_num_seqs:
        return f"asks for {num_seqs} sequences at once, max_num_seqs is {config.max_num_seqs}"
    if state.is_phased and num_prompt > longest:
        return f"has {num_prompt} tokens; a phased step takes {longest} (max_num_batched_tokens)"
    return None


def find_prefix(state: SchedulerState, request: RequestState, plan: StepPlan) -> CachedPrefix:
    """Return the cached prefix of a waiting request. What running rows fill, in this step too, is part of the cache.

    Decoding does not insert that: the first lookup of a step does. A head that is stopped before it costs no hashes.
    """
    if not plan.has_filled_cache:
        rows, ends = state.batch.running.rows, plan.ends_of(state.table.num_computed)
        state.kv.prefix_cache.cache_filled(rows, ends[rows])
        plan.has_filled_cache = True
    return state.kv.get_computed_blocks(request)


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
            if state.kv.tables.has_states:
                num_drafts += _num_computed_again(state)
            plan.budget = min(plan.budget, num_decodes + num_drafts + share)
            plan.prompt_budget = share


def _num_computed_again(state: SchedulerState) -> int:
    """Return how many tokens decoding rows lack more than one each: right drafts before a wrong one, with states."""
    rows = np.setdiff1d(state.batch.running.rows, list(state.batch.prefilling))
    return int(np.maximum(state.table.num_known(rows) - state.table.num_computed[rows] - 1, 0).sum())


def fit_chunk(state: SchedulerState, plan: StepPlan, request: RequestState, start: int, num_new: int) -> Chunk:
    """Return how many of `num_new` tokens from `start` a request that would enter may compute, by the budgets.

    What the encoder says comes after: a request that was swapped out needs it no more.
    """
    if plan.row_cap:
        num_new = min(num_new, max(plan.row_cap, _longest_item(state, request, start)))
    if plan.prompt_budget is not None:
        num_new = min(num_new, plan.prompt_budget)
        if num_new == 0:
            return Chunk(0, Reason.PREFILL_SHARE)
    if num_new > plan.budget:
        num_new = plan.budget if _may_cut(state, start + num_new) else 0
    return Chunk(num_new)


def fit_chunks(
    state: SchedulerState, plan: StepPlan, rows: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens running `rows` may compute from `start` on, int32, and the last rule that shortened that.

    rows: in running order, up to the last running one; none of them is placed yet.
    The second is int8 [num_rows]: 0 if none did, else as BY_ENCODER.
    """
    num_new = state.drafts.num_wanted(rows, start)
    limits = np.zeros(len(rows), np.int8)
    if plan.row_cap:  # neither rows with drafts are capped, nor a media item that must stay whole
        caps = np.where(state.drafts.num_offered[rows], num_new, plan.row_cap)
        if state.encoder.whole_items:
            for i in state.encoder.where_media(rows):
                longest = _longest_item(state, state.table.owner(int(rows[i])).request, int(start[i]))
                caps[i] = max(int(caps[i]), longest)
        limits[num_new > caps] = _ROW_CAP
        num_new = np.minimum(num_new, caps)
    if plan.most_decodes is None and plan.prompt_budget is None and num_new.sum() <= plan.budget:
        return num_new, limits
    is_prompt = np.isin(rows, list(state.batch.prefilling))
    if plan.most_decodes is not None:
        decodes = (num_new > 0) & ~is_prompt
        waits = decodes & (np.cumsum(decodes) > plan.most_decodes - len(plan.decodes))
        limits[waits] = _STAGES
        num_new = np.where(waits, 0, num_new)
    wanted = num_new
    if plan.prompt_budget is not None:
        prompts = np.where(is_prompt, num_new, 0)
        num_new = np.where(is_prompt, _share_out(plan.prompt_budget, prompts), num_new)
        limits[num_new < wanted] = _PREFILL_SHARE
    if num_new.sum() > plan.budget:
        num_new = _fit_budget(state, plan, rows, num_new, is_prompt)
        if plan.prompt_budget is not None:  # a prompt that the budget cuts leaves the rest of its share to the next
            before = np.cumsum(is_prompt * num_new) - is_prompt * num_new
            wanted = np.where(is_prompt, np.minimum(wanted, plan.prompt_budget - before), wanted)
        limits[num_new < wanted] = _BUDGET
    return num_new, limits


_LIMITS = (Reason.ROW_CAP, Reason.STAGES, Reason.PREFILL_SHARE, Reason.BUDGET, Reason.ENCODER)
_ROW_CAP, _STAGES, _PREFILL_SHARE, _BUDGET, BY_ENCODER = range(1, 6)  # 0: nothing


def note_limited(state: SchedulerState, rows: np.ndarray, limits: np.ndarray) -> None:
    """The running `rows` compute less than they could where `limits` is not 0: write for which reason, if it is new."""
    for i in state.batch.newly_limited(rows, limits).tolist():
        sequence = state.table.owner(int(rows[i]))
        state.events.write(Limited, sequence.request.spec, sequence.index, _LIMITS[limits[i] - 1])


def _fit_budget(
    state: SchedulerState, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray, is_prompt: np.ndarray
) -> np.ndarray:
    """Cut what exceeds the token budget, the last rows first.

    Drafts leave one token for each decoding row after them; a prompt leaves one for each that has siblings, so that
    these run together.
    """
    decodes = (num_new > 0) & ~is_prompt
    with_siblings = decodes & state.table.have_siblings(state.batch.running.rows)[-len(rows) :]
    kept_by_prompt = with_siblings.sum() - np.cumsum(with_siblings)
    cut, left, begin = np.zeros_like(num_new), plan.budget, 0
    for end in (*np.flatnonzero(is_prompt).tolist(), len(rows)):
        between = slice(begin, end)  # decoding rows up to the next prompt
        first = decodes[between].astype(np.int32)
        for_drafts = max(left - int(decodes[begin:].sum()), 0)
        cut[between] = _share_out(left, first) + _share_out(for_drafts, num_new[between] - first)
        left -= int(cut[between].sum())
        if end < len(rows):
            cut[end] = min(max(left - int(kept_by_prompt[end]), 0), int(num_new[end]))
            left -= int(cut[end])
        begin = end + 1
    return cut


def _share_out(budget: int, wanted: np.ndarray) -> np.ndarray:
    """Earlier rows get what they want; the last one served gets the rest."""
    return np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted).astype(np.int32)


def place_chunk(
    state: SchedulerState, plan: StepPlan, request: RequestState, row: int, start: int, chunk: Chunk
) -> None:
    """A row computes the chunk, and runs the encoder for its items."""
    one = np.array([(row, start, chunk.num_new)], np.int32)
    place_chunks(state, plan, one[:, 0], one[:, 1], one[:, 2])
    state.encoder.place(plan, request, row, chunk)


def place_chunks(
    state: SchedulerState, plan: StepPlan, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray
) -> None:
    """Rows compute their next `num_new` tokens. Those that enter take of the budget for prompts."""
    plan.place(rows, start, num_new, int(num_new.sum()))
    if plan.prompt_budget is None and plan.most_decodes is None:
        return
    is_prompt = np.isin(rows, [*state.batch.prefilling, *plan.entering])
    if plan.most_decodes is not None:
        plan.decodes.update(rows[~is_prompt].tolist())
    if plan.prompt_budget is not None:
        plan.prompts.update(rows[is_prompt].tolist())
        plan.prompt_budget -= int(num_new[is_prompt].sum())


def _longest_item(state: SchedulerState, request: RequestState, start: int) -> int:
    """Return the tokens of the longest media item from `start` on that must stay whole; 0 if there is none."""
    media = request.spec.media if state.encoder.whole_items else ()
    return max((item.length for item in media if item.end > start), default=0)


def _may_cut(state: SchedulerState, num_tokens: int) -> bool:
    """Prompts are cut in mixed mode only; but a phased engine must cut what has outgrown a step with its output."""
    return num_tokens > state.config.max_num_batched_tokens if state.is_phased else state.cuts_prompts
