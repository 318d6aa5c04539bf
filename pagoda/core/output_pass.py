"""OutputPass: apply what a step gave: commit tokens, find ends, free what ended, and tell each client."""

from dataclasses import replace

import numpy as np

from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_table import Branch, LiveRequest
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from pagoda.core.scheduler_state import SchedulerState, only_finishes

_LARGEST_TOKEN_ID = 1 << 22


class StopTokens:
    """Which token ids end anything at all: one look-up for a whole batch tells whether any row must be looked at."""

    def __init__(self) -> None:
        self._ends = np.zeros(2, np.bool_)  # the last entry is always False: larger ids are clipped to it

    def add(self, request: Request) -> None:
        ids = [*request.eos_token_ids, *(request.sampling.stop_token_ids if request.sampling else ())]
        ids = [token for token in ids if 0 <= token < _LARGEST_TOKEN_ID]
        if not ids:
            return
        if max(ids) + 2 > len(self._ends):
            self._ends = np.pad(self._ends, (0, max(ids) + 2 - len(self._ends)))
        self._ends[ids] = True

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, shape of `tokens`: may end something. False is certain."""
        return self._ends.take(tokens, mode="clip")


def find_end(
    request: Request, output_len: int, tokens: list[int], length_limit: int
) -> tuple[int, RequestStatus | None, int | None]:
    """(tokens that stand, status or None while it goes on, stop token) for `tokens` behind `output_len` outputs.

    Asked token by token: eos, stop tokens, then length. Below min_tokens no token ends anything.
    """
    sampling = request.sampling
    assert sampling is not None
    for at, token in enumerate(tokens, 1):
        if output_len + at >= sampling.min_tokens:
            if not sampling.ignore_eos and token in request.eos_token_ids:
                return at, RequestStatus.FINISHED_STOPPED, None
            if token in sampling.stop_token_ids:
                return at, RequestStatus.FINISHED_STOPPED, token
        if request.num_prompt_tokens + output_len + at >= length_limit:
            return at, RequestStatus.FINISHED_LENGTH_CAPPED, None
    return len(tokens), None, None


class OutputPass:
    """Takes results in the order of planning."""

    def __init__(self, state: SchedulerState, stops: StopTokens) -> None:
        self._state = state
        self._stops = stops

    def apply(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        state = self._state
        if output.is_empty:
            return state.take_untold()
        planned = state.in_flight.popleft()
        assert planned.step == output.step == result.step, "results must come in the order of planning"
        self._observe(output, result)
        apply = self._apply_plain if self._is_plain(output, result) else self._apply_any
        told = apply(output, result)
        if state.table.has_departed:
            state.table.step_is_home(output.step)
            for branch in state.late_branches.pop(output.step, ()):
                branch.in_flight_steps.discard(output.step)
        if state.untold:
            for client, finishes in state.take_untold().items():
                told[client] = _with_finishes(told.get(client), finishes.finishes)
        return told

    def _observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """What the step tells about time, windows and media."""
        state = self._state
        if state.kv.windows:
            state.table.num_in_flight[output.rows] -= output.num_new
        if state.prompt_steps:
            planned_at_s = state.prompt_steps.pop(output.step, None)
            if planned_at_s is not None:
                state.delay_gate.last_prompt_step_s = result.duration_s or state.clock.now() - planned_at_s
        num_copied = len(output.swap_in) + len(output.swap_out)
        state.costs.observe(
            output.total_num_scheduled_tokens, len(output.rows), result.duration_s, num_copied, result.swap_s
        )
        for row in state.media_rows.keys() & set(output.rows.tolist()) if state.media_rows else ():
            live = state.media_rows[row]
            if state.encoder_decoder:
                state.encoder.drop_all(live)
            else:
                done = int(state.table.num_computed[row] - state.table.num_pending[row])
                state.encoder.drop_passed(live, done)

    def _is_plain(self, output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
        """One token for each row that sampled, and nothing else to look at."""
        return (
            result.sampled.shape[1] == 1
            and not output.drafts
            and not result.failed
            and not result.pooled
            and not result.prompt_logprobs
            and not self._state.table.has_departed
        )

    # One token a row

    def _apply_plain(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        state, table = self._state, self._state.table
        rows, tokens = output.sample_rows, result.sampled[:, 0]
        if not len(rows):
            return {}
        at = table.num_tokens[rows]
        table.token_ids[rows, at] = tokens
        ends = at + 1
        table.num_tokens[rows] = ends
        if state.config.async_scheduling:
            table.num_pending[rows] -= 1
        state.counters.generation_tokens += len(rows)
        over = self._stops.among(tokens) | (ends >= table.length_limit[rows])
        lineup = state.lineup
        same_rows = rows is lineup.rows
        handles = lineup.handles if same_rows else table.handle[rows]
        branches = lineup.branches if same_rows else table.branch[rows]
        counts = lineup.ones if same_rows else np.ones(len(rows), np.int32)
        client = lineup.client
        clients = table.client[rows] if client is None else None
        first_words = self._first_words(rows) if state.silent else {}
        finishes = self._end_rows(rows, tokens, at, over) if over.any() else {}
        outputs = EngineCoreOutputs(handles, branches, counts, tokens, logprobs=result.logprobs)
        return self._tell(outputs, clients, client, finishes, first_words)

    def _end_rows(
        self, rows: np.ndarray, tokens: np.ndarray, at: np.ndarray, over: np.ndarray
    ) -> dict[int, list[Finish]]:
        """End those rows whose new token really ends them; Finish records by client."""
        finishes: dict[int, list[Finish]] = {}
        table = self._state.table
        for i in np.flatnonzero(over).tolist():
            branch = table.branch_of[int(rows[i])]
            assert branch is not None
            request = branch.live.request
            output_len = int(at[i]) - request.num_prompt_tokens
            _, status, reason = find_end(request, output_len, [int(tokens[i])], int(table.length_limit[branch.row]))
            if status is not None:
                finishes.setdefault(request.client_index, []).append(self._state.end_branch(branch, status, reason))
        return finishes

    # Drafts, late results, failures, pooled rows

    def _apply_any(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """The definition, row by row: `_apply_plain` is the same for its case."""
        state, table = self._state, self._state.table
        finishes: dict[int, list[Finish]] = {}
        rows = output.sample_rows
        stands = np.zeros(len(rows), np.int32)  # tokens of each sample that stand
        clients = table.client[rows]
        first_words = self._first_words(rows[result.num_sampled > 0])
        prompt_logprobs = self._by_handle_prompt_logprobs(output, result)  # before a first token ends its request
        for i, row in enumerate(rows.tolist()):
            branch = table.branch_of[row]
            if branch is None or branch.is_finished:
                continue
            if row in result.failed:
                self._fail(branch, result.failed[row], finishes)
                continue
            tokens = result.sampled[i, : result.num_sampled[i]].tolist()
            self._roll_back(branch, row, output, len(tokens))
            stands[i], finish = self._append(branch, tokens)
            if finish is not None:
                finishes.setdefault(int(clients[i]), []).append(finish)
        for row, message in result.failed.items():
            branch = table.branch_of[row]
            if branch is not None and not branch.is_finished:
                self._fail(branch, message, finishes)
        pooled: dict[int, dict[int, np.ndarray]] = {}
        for row, vector in result.pooled.items():
            branch = table.branch_of[row]
            if branch is not None and branch.row == row:
                request = branch.live.request
                finishes.setdefault(request.client_index, []).append(
                    state.end_branch(branch, RequestStatus.FINISHED_STOPPED)
                )
                pooled.setdefault(request.client_index, {})[request.handle] = vector
        state.counters.generation_tokens += int(stands.sum())
        columns = np.arange(result.sampled.shape[1])
        kept = columns < stands[:, None]
        spoke = stands > 0
        logprobs = result.logprobs
        if logprobs is not None:
            logprobs = _select(logprobs, kept[columns < result.num_sampled[:, None]])
        outputs = EngineCoreOutputs(
            table.handle[rows[spoke]], table.branch[rows[spoke]], stands[spoke], result.sampled[kept], logprobs=logprobs
        )
        told = self._tell(outputs, clients[spoke], None, finishes, first_words)
        for client, by_handle in prompt_logprobs.items():
            told[client] = replace(told.get(client) or only_finishes(()), prompt_logprobs=by_handle)
        for client, vectors in pooled.items():
            told[client] = replace(told.get(client) or only_finishes(()), pooled=vectors)
        return told

    def _roll_back(self, branch: Branch, row: int, output: SchedulerOutput, num_tokens: int) -> None:
        """Take back the drafts that were not accepted: their slots are written again."""
        state, table = self._state, self._state.table
        drafts = output.drafts.get(row)
        if drafts is None:
            if branch.row == row and state.config.async_scheduling:
                table.num_pending[row] -= 1
            return
        num_accepted = max(num_tokens - 1, 0)
        num_rejected = len(drafts) - num_accepted
        if branch.row == row:
            table.num_computed[row] -= num_rejected
        elif branch.status is RequestStatus.SWAPPED:  # parked while in flight; a dropped branch has no count to lower
            branch.num_computed -= num_rejected
        state.counters.drafts += 1
        state.counters.drafted_tokens += len(drafts)
        state.counters.accepted_tokens += num_accepted
        state.quiet_steps = -1

    def _append(self, branch: Branch, tokens: list[int]) -> tuple[int, Finish | None]:
        """Append to a running branch, or to one that was preempted or parked meanwhile."""
        table, request = self._state.table, branch.live.request
        if branch.row >= 0:
            row = branch.row
            at, limit = int(table.num_tokens[row]), int(table.length_limit[row])
            kept, status, reason = find_end(request, at - request.num_prompt_tokens, tokens, limit)
            table.token_ids[row, at : at + kept] = tokens[:kept]
            table.num_tokens[row] = at + kept
        else:
            at, limit = len(branch.token_ids), table.limit_of(request)
            kept, status, reason = find_end(request, at - request.num_prompt_tokens, tokens, limit)
            branch.token_ids = np.append(branch.token_ids, np.array(tokens[:kept], np.int32))
        return kept, None if status is None else self._state.end_branch(branch, status, reason)

    def _fail(self, branch: Branch, message: str, finishes: dict[int, list[Finish]]) -> None:
        """The numbers of this row are no longer finite: it ends, and its KV is found by nobody."""
        state = self._state
        if branch.row >= 0:
            state.kv.content.forget_content(branch.row)
        finish = state.end_branch(branch, RequestStatus.FINISHED_ERROR, message=message)
        finishes.setdefault(branch.live.request.client_index, []).append(finish)

    def _by_handle_prompt_logprobs(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, dict[int, LogprobColumns]]:
        """By client and handle, without positions that were told before a preemption."""
        told: dict[int, dict[int, LogprobColumns]] = {}
        for row, columns in result.prompt_logprobs.items():
            branch = self._state.table.branch_of[row]
            if branch is None or row in result.failed:
                continue
            live = branch.live
            start = int(output.start[output.rows == row][0])
            new = max(live.num_prompt_positions_told - start, 0)
            live.num_prompt_positions_told = max(live.num_prompt_positions_told, start + len(columns.ranks))
            if new < len(columns.ranks):
                mask = np.arange(len(columns.ranks)) >= new
                told.setdefault(live.request.client_index, {})[live.request.handle] = _select(columns, mask)
        return told

    # Telling

    def _tell(
        self,
        outputs: EngineCoreOutputs,
        clients: np.ndarray | None,
        client: int | None,
        finishes: dict[int, list[Finish]],
        first_words: dict[int, list[LiveRequest]],
    ) -> dict[int, EngineCoreOutputs]:
        """Group by client. clients: one a row, or None where all are `client`'s."""
        if clients is None:
            assert client is not None
            told = {client: outputs}
        else:
            told = {int(one): _of_client(outputs, clients == one) for one in np.unique(clients)}
        for one, spoke in first_words.items():
            cached = {live.request.handle: live.num_cached_tokens for live in spoke}
            queued = {live.request.handle: live.queue_s for live in spoke}
            # A first token that failed leaves nothing but an end to report.
            told[one] = replace(told.get(one) or only_finishes(()), num_cached_tokens=cached, queue_s=queued)
        for one, ended in finishes.items():
            told[one] = _with_finishes(told.get(one), tuple(ended))
        return told

    def _first_words(self, rows: np.ndarray) -> dict[int, list[LiveRequest]]:
        """By client, requests that emit for the first time."""
        said: dict[int, list[LiveRequest]] = {}
        for row in self._state.silent.keys() & set(rows.tolist()):
            live = self._state.silent.pop(row)
            live.has_spoken = True
            self._state.counters.prompt_tokens += live.request.num_prompt_tokens
            said.setdefault(live.request.client_index, []).append(live)
        return said


def _with_finishes(outputs: EngineCoreOutputs | None, finishes: tuple[Finish, ...]) -> EngineCoreOutputs:
    if outputs is None:
        return only_finishes(finishes)
    return replace(outputs, finishes=outputs.finishes + finishes)


def _of_client(outputs: EngineCoreOutputs, mine: np.ndarray) -> EngineCoreOutputs:
    """The entries of the branches in the mask."""
    tokens = np.repeat(mine, outputs.counts)
    logprobs = _select(outputs.logprobs, tokens) if outputs.logprobs is not None else None
    return EngineCoreOutputs(
        outputs.handles[mine],
        outputs.branches[mine],
        outputs.counts[mine],
        outputs.token_ids[tokens],
        logprobs=logprobs,
    )


def _select(columns: LogprobColumns, mask: np.ndarray) -> LogprobColumns:
    return LogprobColumns(columns.token_ids[mask], columns.logprobs[mask], columns.ranks[mask])
