"""What both lines ask when a request wants to enter: seats, blocks, and what is noted."""

from enum import Enum

from pagoda.core.decision_log import Admitted, Held, Reason
from pagoda.core.request import RequestStatus
from pagoda.core.request_table import LiveRequest
from pagoda.core.scheduler_state import SchedulerState


class Verdict(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class EntryChecks:
    """Questions and notes shared by the passes that let requests in."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def has_seats(self, live: LiveRequest) -> bool:
        state = self._state
        seats = len(live.unfinished)
        latent = state.num_seats_taken - len(state.lineup.rows)
        return (
            state.num_seats_taken + seats <= state.config.max_num_seqs and state.table.num_free_rows >= latent + seats
        )

    def against_free(self, need: int) -> tuple[Verdict, Reason]:
        """The watermark is kept only beside running requests: alone, a big request may have the whole pool."""
        state = self._state
        free = state.kv.pool.num_free
        if need > free:
            nobody_will_free_any = free == state.kv.pool.num_blocks and not state.running
            return (Verdict.NEVER, Reason.NEVER) if nobody_will_free_any else (Verdict.LATER, Reason.BLOCKS)
        if state.running and need + state.watermark_blocks > free:
            return Verdict.LATER, Reason.WATERMARK
        return Verdict.OK, Reason.BLOCKS

    def refuse(self, live: LiveRequest, why: str) -> None:
        """`live` ends unserved; if it has output already, that stays, and the end is one of length."""
        state = self._state
        has_output = any(len(branch.token_ids) > live.request.num_prompt_tokens for branch in live.branches)
        status = RequestStatus.FINISHED_LENGTH_CAPPED if has_output else RequestStatus.FINISHED_IGNORED
        state.warn_ignored(live, why)
        state.tell_later(live, state.end_request(live, status, f"request {live.request_id} {why}"))
        if state.log.enabled:
            state.log.note(Held(live.request_id, Reason.NEVER, stops_line=False))

    def hold(self, live: LiveRequest, reason: Reason, *, stops_line: bool = True) -> None:
        if self._state.log.enabled:
            self._state.log.note(Held(live.request_id, reason, stops_line))

    def note_admitted(self, live: LiveRequest, num_tokens: int, num_cached: int) -> None:
        state = self._state
        if state.log.enabled:
            row = live.unfinished[0].row
            blocks = sum(int((table != 0).sum()) for table in state.table.tables(row))
            state.log.note(Admitted(live.request_id, num_tokens, num_cached, blocks, state.kv.pool.num_free))
