"""Journal: record what is needed to replay every running request on a new engine after a crash.

For each request it holds the request itself and the tokens emitted so far. Sampling is keyed by seed and position, so a
sequence replayed with its tokens continues exactly as it would have. Suspects finds the request that kills engine
processes, and says which requests the next one gets, and when.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pagoda.base.abbreviate import shown_id
from pagoda.core.events import Admitted, ClientEvent, Ended, Preempted
from pagoda.core.request import Request, RequestKey, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, LogprobColumns, only_events
from pagoda.engine.flight_recorder import FlightRecord, packed_key

logger = logging.getLogger("pagoda.engine")

PROBATION_TOKENS = 2
MAX_DEATHS = 5  # for requests that kill an engine later than a probe can tell


@dataclass(slots=True)
class JournalEntry:
    """One unfinished request.

    tokens: emitted tokens per sequence.   live: indices of unfinished sequences.
    num_deaths: engine processes that died during a step with this request, and that no rejected one explains.
    is_suspect: whether it may have killed one. PROBATION_TOKENS tokens per sequence from one engine process clear it
        (the first shows that prefill works, the second that decode does); a beam search, as many steps.
    entered_process: number of the last engine process it was sent to, 0 if none.   num_since_entry: tokens from it.
    num_prompt_rows: prompt log-probabilities sent so far.   num_rows_to_skip: those that a new engine sends again.
    num_owed: tokens that its engine computes before it emits the next one; 0 once that has emitted one.
    num_cached: of its prompt, tokens that are probably in that engine's prefix cache.
    weights: of the engine process that has begun it, as a digest.
    """

    request: Request
    tokens: list[list[int]]
    live: set[int]
    is_suspect: bool = False
    entered_process: int = 0
    num_since_entry: int = 0
    num_prompt_rows: int = 0
    num_rows_to_skip: int = 0
    num_deaths: int = 0
    num_owed: int = 0
    num_cached: int = 0
    weights: str = ""

    @classmethod
    def of(cls, request: Request) -> "JournalEntry":
        """Return the entry of a request that has emitted nothing, or what it begins with."""
        prior = request.prior_output or ((),) * request.num_seqs
        return cls(request, [list(tokens) for tokens in prior], set(range(request.num_seqs)))

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of all sequences so far."""
        return self.request.num_prompt_tokens + sum(map(len, self.tokens))

    @property
    def needs_weights(self) -> str:
        """The weights with which it must continue, "" if any will do: its client has nothing of it yet."""
        return self.weights if any(self.tokens) or self.num_prompt_rows else ""


class Journal:
    """Unfinished requests of all clients, in order of arrival. Owned by what starts the engine process.

    num_seqs: their unfinished sequences.   num_owed: tokens to compute before each of them emits its next one.
    """

    def __init__(self) -> None:
        self._entries: dict[RequestKey, JournalEntry] = {}
        self._begun = dict[RequestKey, None]()  # of which an engine computes what it owes, in order of their admission
        self.num_seqs = self.num_owed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    def add(self, entry: JournalEntry) -> JournalEntry:
        """Add an entry, which may be that of another journal so far, and return it. Its key must not be in use."""
        key = entry.request.key
        assert key not in self._entries, f"client and handle {key} are in use"
        self._entries[key] = entry
        self.num_seqs += len(entry.live)
        self.num_owed += entry.num_owed
        self.owe(entry)
        return entry

    def owe(self, entry: JournalEntry) -> None:
        """Record that an engine begins with a request anew."""
        self._begun.pop(entry.request.key, None)
        self._set_owed(entry, entry.num_tokens - entry.num_cached)

    def _note_computed(self, num_tokens: int) -> None:
        """Record that an engine has computed tokens that it owed. Of the last one of a request, it emits the next."""
        for key in self._begun:
            if num_tokens <= 0:
                return
            entry = self._entries[key]
            num_computed = min(num_tokens, entry.num_owed - 1)
            self._set_owed(entry, entry.num_owed - num_computed)
            num_tokens -= num_computed

    def _note(self, event: ClientEvent) -> None:
        """Record what an engine owes once it has begun with a request, or has to begin anew."""
        if isinstance(event, Admitted | Preempted):
            key = event.client, event.handle
            entry = self._entries.get(key)
            if entry is None:
                return
            if isinstance(event, Admitted):
                self._begun[key] = None
                self._set_owed(entry, max(1, event.num_tokens - event.num_computed))
            elif event.lost_tokens:
                self._begun.pop(key, None)
                self._set_owed(entry, event.lost_tokens)

    def _set_owed(self, entry: JournalEntry, num_owed: int) -> None:
        self.num_owed += num_owed - entry.num_owed
        entry.num_owed = num_owed

    def close(self, key: RequestKey) -> JournalEntry | None:
        """Remove and return a request's entry; None for an unknown one."""
        entry = self._entries.pop(key, None)
        self._begun.pop(key, None)
        if entry is not None:
            self.num_seqs -= len(entry.live)
            self.num_owed -= entry.num_owed
        return entry

    def get(self, key: RequestKey) -> JournalEntry | None:
        return self._entries.get(key)

    def of_client(self, client_index: int) -> list[RequestKey]:
        """Return the unfinished requests of a client."""
        return [key for key in self._entries if key[0] == client_index]

    def end_sequence(self, key: RequestKey, sequence: int) -> None:
        """Record that a sequence has finished. Remove the request after its last one."""
        entry = self._entries.get(key)
        if entry is not None and sequence in entry.live:
            entry.live.remove(sequence)
            self.num_seqs -= 1
            if not entry.live:
                self.close(key)

    def record(self, outputs: Mapping[int, EngineCoreOutputs], num_computed: int = 0) -> dict[int, EngineCoreOutputs]:
        """Record one step's outputs, by client, and return what of them is new to it.

        num_computed: tokens of the steps since the last record, those emitted included.
        Prompt log-probabilities of requests aborted meanwhile are dropped; the reader drops their tokens.
        """
        for one in outputs.values():
            for event in one.events:
                self._note(event)
        self._note_computed(num_computed - sum(len(one.token_ids) for one in outputs.values()))
        return {client_index: self._record(client_index, one) for client_index, one in outputs.items()}

    def _record(self, client_index: int, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        at = 0
        flat = outputs.token_ids.tolist()
        for handle, sequence, count in zip(
            outputs.handles.tolist(), outputs.sequences.tolist(), outputs.counts.tolist(), strict=True
        ):
            entry = self._entries.get((client_index, handle))
            if entry is not None:
                entry.tokens[sequence].extend(flat[at : at + count])
                entry.num_since_entry += count
                if entry.num_owed:
                    self._begun.pop(entry.request.key, None)
                    self._set_owed(entry, 0)
                if entry.num_since_entry >= PROBATION_TOKENS * len(entry.live):
                    entry.is_suspect = False
            at += count
        if outputs.prompt_logprobs:
            outputs = dataclasses.replace(
                outputs, prompt_logprobs=self._record_prompt_rows(client_index, outputs.prompt_logprobs)
            )
        for end in outputs.ends:
            self.end_sequence((client_index, end.handle), end.sequence)
        return outputs

    def _record_prompt_rows(
        self, client_index: int, received: Mapping[int, LogprobColumns]
    ) -> dict[int, LogprobColumns]:
        """Drop the rows that an earlier engine has sent: a new one computes the prompt from the beginning."""
        fresh: dict[int, LogprobColumns] = {}
        for handle, columns in received.items():
            entry = self._entries.get((client_index, handle))
            if entry is None:
                continue
            skip = min(entry.num_rows_to_skip, len(columns.ranks))
            entry.num_rows_to_skip -= skip
            entry.num_prompt_rows += len(columns.ranks) - skip
            if skip < len(columns.ranks):
                fresh[handle] = LogprobColumns(columns.token_ids[skip:], columns.logprobs[skip:], columns.ranks[skip:])
        return fresh

    def replay(self, entry: JournalEntry) -> Request:
        """Return the request that continues `entry` on a new engine.

        Sequences that are not `live` must be ended there: not all ends can be seen from the tokens.
        """
        entry.num_rows_to_skip = entry.num_prompt_rows
        if not any(entry.tokens):
            return entry.request
        return dataclasses.replace(entry.request, prior_output=tuple(map(tuple, entry.tokens)))


def error_outputs(
    request: Request, message: str, status: RequestStatus = RequestStatus.FINISHED_ERROR, live: Iterable[int] = ()
) -> EngineCoreOutputs:
    """Return outputs that finish sequences of a request with an error and no token.   live: which; (): all."""
    at = (0, time.monotonic(), request.client_index, request.handle)  # in no step
    return only_events(
        Ended(*at, request.request_id, sequence, status, message=message)
        for sequence in sorted(live) or range(request.num_seqs)
    )


# ---- which request killed an engine


class Suspects:
    """Which of a journal's entries the current engine process gets, and when, so that one that kills it is found.

    One rule. A SIGKILL from outside blames no request. After any other death the requests of the steps that ran are
    suspects: the next engine gets them one at a time, each after the previous one has emitted two tokens per sequence,
    and nothing else until all have: no other request, and no adapter to load. A suspect that kills an engine which was
    sent nothing else is rejected, and so is a request in the last steps of MAX_DEATHS engines. All others continue.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._process_number = 0
        self._num_sent = 0  # requests sent to this engine process
        self._waiting: deque[RequestKey] = deque()  # suspects to be probed
        self._probe: RequestKey | None = None
        self._num_probed_tokens = 0  # computed since the probe began

    @property
    def is_probing(self) -> bool:
        """Whether suspects are left: all other requests wait until `next` returns them."""
        return self._probe is not None

    def begin(self, process_number: int) -> list[JournalEntry]:
        """Begin with a new engine process. Return the requests to send to it now, in this order."""
        self._process_number = process_number
        self._num_sent = 0
        self._waiting = deque(entry.request.key for entry in self.in_order())
        self._probe = None
        return self._next_to_send()

    def in_order(self) -> list[JournalEntry]:
        """Return the suspects in the order of their probes: first the one that was probed when the last engine died.

        Then it is alone.
        """
        suspects = [entry for entry in self._journal if entry.is_suspect]
        return sorted(suspects, key=lambda entry: entry.request.key != self._probe)

    def sent(self, entry: JournalEntry) -> None:
        """Record that a request is sent to the engine process."""
        entry.entered_process = self._process_number
        entry.num_since_entry = 0
        self._journal.owe(entry)
        self._num_sent += 1

    def note_computed(self, num_tokens: int) -> None:
        """Clear a beam search that is probed once as many tokens have been computed as its prompt and two steps have.

        It emits none before its end, until when all others would wait.
        """
        self._num_probed_tokens += num_tokens
        probed = self._journal.get(self._probe) if self._probe is not None else None
        if probed is not None and probed.request.is_beam_search:
            request = probed.request
            if self._num_probed_tokens >= len(request.prompt_token_ids) + PROBATION_TOKENS * request.num_seqs:
                probed.is_suspect = False

    def next(self) -> list[JournalEntry]:
        """Return the requests to send now, if the probed suspect has been cleared or has ended: the next suspect.

        After the last suspect, all others.
        """
        probed = self._journal.get(self._probe) if self._probe is not None else None
        if self._probe is None or (probed is not None and probed.is_suspect):
            return []
        return self._next_to_send()

    def assign_blame(self, flight: FlightRecord, killed_from_outside: bool) -> list[JournalEntry]:
        """Make the requests in the steps of a death suspects. Remove and return those that are rejected.

        flight: of the dead engine.
        killed_from_outside: by a SIGKILL that neither this server nor a lack of memory caused.
        """
        if killed_from_outside:
            return []
        rejected: list[JournalEntry] = []
        for entry in self._in_last_steps(flight):
            entry.num_deaths += 1
            if (entry.is_suspect and self._num_sent == 1) or entry.num_deaths >= MAX_DEATHS:
                self._journal.close(entry.request.key)
                logger.error(
                    "request %s was running in %d engine deaths: rejected",
                    shown_id(entry.request.request_id),
                    entry.num_deaths,
                )
                rejected.append(entry)
            entry.is_suspect = True
        if rejected:  # they explain the deaths in which others took part
            for entry in self._journal:
                entry.num_deaths = 0
        return rejected

    def _next_to_send(self) -> list[JournalEntry]:
        """Return the first waiting suspect that has not ended, or else all requests that this engine has not got."""
        while self._waiting:
            entry = self._journal.get(self._waiting.popleft())
            if entry is not None and entry.is_suspect:
                self._probe, self._num_probed_tokens = entry.request.key, 0
                return [entry]
        self._probe = None
        return self.unsent()

    def unsent(self) -> list[JournalEntry]:
        """Return the requests that this engine has not got."""
        return [entry for entry in self._journal if entry.entered_process != self._process_number]

    def _in_last_steps(self, flight: FlightRecord) -> list[JournalEntry]:
        """Return the requests in the steps of a death: all that the engine was sent, if none of them is known."""
        sent = [entry for entry in self._journal if entry.entered_process == self._process_number]
        return [entry for entry in sent if packed_key(entry.request.key) in flight.keys] or sent
