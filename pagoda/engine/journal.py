"""Journal: all that is needed to put every live request into a new engine, as if the old one had never died.

It holds, for each request, its cold facts and the tokens its branches have emitted. Sampling is keyed by seed and
position, so a branch re-entered with its tokens goes on exactly as it would have.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, LogprobColumns

PROBATION_TOKENS = 2


@dataclass(slots=True)
class JournalEntry:
    """One live request.

    tokens: per branch, what it has emitted.   live: branches that have not ended.
    num_deaths: engine deaths during a step it was in.   strikes: those not cleared; PROBATION_TOKENS emitted by one
        engine process clear them (the first token needs a prefill, the second a decode step, so both have worked).
    entered_process: number of the engine process it entered last, 0 before the first.   aliases: handles of its parts
        there.
    num_prompt_rows: prompt log-probabilities sent so far.   num_rows_to_skip: those that a new engine sends again.
    """

    request: Request
    tokens: list[list[int]]
    live: set[int]
    strikes: int = 0
    num_deaths: int = 0
    entered_process: int = 0
    num_since_entry: int = 0
    num_prompt_rows: int = 0
    num_rows_to_skip: int = 0
    aliases: set[int] = field(default_factory=set)

    @property
    def is_on_probation(self) -> bool:
        return self.strikes > 0


class Journal:
    """Live requests by id, in order of arrival. One owner: the client of the engine process.

    A replayed branch of a request with n > 1 runs as a request of its own; `alias` numbers map its outputs back.
    """

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}
        self._by_handle: dict[int, JournalEntry] = {}
        self._alias: dict[int, tuple[int, int]] = {}  # alias handle -> (handle, branch)
        self._next_alias = -1  # clients' own handles are not negative

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    def open(self, request: Request) -> JournalEntry:
        """Begin to follow a request. Its id and handle must not be live."""
        assert request.request_id not in self._entries, f"request id {request.request_id!r} is live"
        assert request.handle not in self._by_handle, f"handle {request.handle} is live"
        prior = request.prior_output or ((),) * request.num_seqs
        entry = JournalEntry(request, [list(tokens) for tokens in prior], set(range(request.num_seqs)))
        self._entries[request.request_id] = entry
        self._by_handle[request.handle] = entry
        return entry

    def close(self, request_id: str) -> JournalEntry | None:
        """Stop following; unknown ids are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._by_handle.pop(entry.request.handle, None)
            for alias in entry.aliases:
                self._alias.pop(alias, None)
        return entry

    def get(self, request_id: str) -> JournalEntry | None:
        return self._entries.get(request_id)

    def by_handle(self, handle: int) -> JournalEntry | None:
        """The request that has this handle, or one of whose parts has it in the current engine."""
        own, _ = self._alias.get(handle, (handle, 0))
        return self._by_handle.get(own)

    def end_branch(self, request_id: str, branch: int) -> None:
        """A branch ended by its client's will (a stop string)."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.live.discard(branch)
            if not entry.live:
                self.close(request_id)

    def record(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Write down one step's outputs; gives them back in the clients' own handles and branches.

        What belongs to no live request is left out (outputs that crossed an abort).
        """
        if self._alias:
            outputs = self._undo_aliases(outputs)
        at = 0
        flat = outputs.token_ids.tolist()
        for handle, branch, count in zip(
            outputs.handles.tolist(), outputs.sequences.tolist(), outputs.counts.tolist(), strict=True
        ):
            entry = self._by_handle.get(handle)
            if entry is not None:
                entry.tokens[branch].extend(flat[at : at + count])
                entry.num_since_entry += count
                if entry.num_since_entry >= PROBATION_TOKENS:
                    entry.strikes = 0
            at += count
        if outputs.prompt_logprobs:
            outputs = dataclasses.replace(outputs, prompt_logprobs=self._record_prompt_rows(outputs.prompt_logprobs))
        if outputs.finishes:
            outputs = dataclasses.replace(outputs, finishes=tuple(map(self._record_finish, outputs.finishes)))
        return outputs

    def _record_prompt_rows(self, told: Mapping[int, LogprobColumns]) -> dict[int, LogprobColumns]:
        """Drop the rows that an earlier engine has sent: a new one computes the prompt from its beginning."""
        fresh: dict[int, LogprobColumns] = {}
        for handle, columns in told.items():
            entry = self._by_handle.get(handle)
            if entry is None:
                continue
            skip = min(entry.num_rows_to_skip, len(columns.ranks))
            entry.num_rows_to_skip -= skip
            entry.num_prompt_rows += len(columns.ranks) - skip
            if skip < len(columns.ranks):
                fresh[handle] = LogprobColumns(columns.token_ids[skip:], columns.logprobs[skip:], columns.ranks[skip:])
        return fresh

    def replay(self, entry: JournalEntry) -> list[Request]:
        """Requests for a new engine that continue `entry` where it stands: one, or one per live branch."""
        request = entry.request
        entry.num_rows_to_skip = entry.num_prompt_rows
        if request.num_seqs == 1:
            return [dataclasses.replace(request, prior_output=(tuple(entry.tokens[0]),))]
        if not any(entry.tokens):
            return [request]
        assert request.sampling is not None
        parts: list[Request] = []
        for branch in sorted(entry.live):
            alias, self._next_alias = self._next_alias, self._next_alias - 1
            self._alias[alias] = (request.handle, branch)
            entry.aliases.add(alias)
            parts.append(
                dataclasses.replace(
                    request,
                    request_id=self.part_id(request.request_id, branch),
                    sampling=dataclasses.replace(request.sampling, n=1),
                    seed=request.seed + branch,
                    handle=alias,
                    prior_output=(tuple(entry.tokens[branch]),),
                )
            )
        return parts

    @staticmethod
    def part_id(request_id: str, branch: int) -> str:
        """An id that no caller's request has: AsyncEngine takes none with control characters."""
        return f"{request_id}\x1f{branch}"

    def engine_ids(self, request_id: str) -> list[str]:
        """The ids under which the current engine knows this request."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.aliases:
            return [request_id]
        return [self.part_id(request_id, branch) for branch in range(entry.request.num_seqs)]

    def engine_branch(self, request_id: str, branch: int) -> tuple[str, int]:
        """The id and branch under which the current engine knows a branch."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.aliases:
            return request_id, branch
        return self.part_id(request_id, branch), 0

    def forget_aliases(self) -> None:
        """The engine that knew them is dead."""
        self._alias.clear()
        for entry in self._entries.values():
            entry.aliases.clear()

    def _undo_aliases(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        handles, branches = outputs.handles.copy(), outputs.sequences.copy()
        for i in np.flatnonzero(handles < 0).tolist():
            handles[i], branches[i] = self._alias.get(int(handles[i]), (int(handles[i]), int(branches[i])))
        finishes = tuple(map(self._undo_finish_alias, outputs.finishes))
        own = {k: self._alias[k][0] if k in self._alias else k for k in outputs.num_cached_tokens}
        queue_s = {own[k]: v for k, v in outputs.queue_s.items()}
        return dataclasses.replace(
            outputs,
            handles=handles,
            sequences=branches,
            finishes=finishes,
            num_cached_tokens={own[k]: v for k, v in outputs.num_cached_tokens.items()},
            queue_s=queue_s,
            # A part re-enters only with tokens, so an earlier engine has sent its prompt rows.
            prompt_logprobs={k: v for k, v in outputs.prompt_logprobs.items() if k >= 0},
        )

    def _undo_finish_alias(self, finish: Finish) -> Finish:
        known = self._alias.get(finish.handle)
        if known is None:
            return finish
        handle, branch = known
        request_id = self._by_handle[handle].request.request_id
        return dataclasses.replace(finish, request_id=request_id, handle=handle, sequence=branch)

    def _record_finish(self, finish: Finish) -> Finish:
        """Ends the branch; whether it was the request's last is known here, not in an engine that saw it alone."""
        self.end_branch(finish.request_id, finish.sequence)
        return dataclasses.replace(finish, request_done=finish.request_id not in self._entries)


def error_outputs(
    entry: JournalEntry, message: str, status: RequestStatus = RequestStatus.FINISHED_ERROR
) -> EngineCoreOutputs:
    """Outputs that end every live branch of a request with an error and no token."""
    live = sorted(entry.live)
    request = entry.request
    return EngineCoreOutputs(
        handles=np.empty(0, np.int64),
        sequences=np.empty(0, np.int32),
        counts=np.empty(0, np.int32),
        token_ids=np.empty(0, np.int32),
        finishes=tuple(
            Finish(request.request_id, request.handle, branch, status, None, branch == live[-1], message)
            for branch in live
        ),
    )
