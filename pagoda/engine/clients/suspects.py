"""Suspects: find the request that kills engine processes, and reject only that one.

One rule. A SIGKILL from outside blames no request. After any other death the requests of the steps that ran are
suspects: the next engine gets them one at a time, each after the previous one has emitted two tokens per sequence, and
nothing else until all have: no other request, and no adapter to load. A suspect that kills an engine which was sent
nothing else is rejected, and so is a request in the last steps of MAX_DEATHS engines. All others continue.
"""

import logging
from collections import deque

from pagoda.engine.clients.journal import Journal, JournalEntry
from pagoda.engine.flight_recorder import FlightRecord, request_key

logger = logging.getLogger("pagoda.engine")

MAX_DEATHS = 5  # for requests that kill an engine later than a probe can tell


class Suspects:
    """Which of a journal's entries the current engine process gets, and when."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._process_number = 0
        self._num_sent = 0  # requests sent to this engine process
        self._waiting: deque[str] = deque()  # suspects to be probed
        self._probe: str | None = None

    @property
    def is_probing(self) -> bool:
        """Whether suspects are left: all other requests wait until `next` returns them."""
        return self._probe is not None

    def begin(self, process_number: int) -> list[JournalEntry]:
        """Begin with a new engine process. Return the requests to send to it now, in this order."""
        self._process_number = process_number
        self._num_sent = 0
        suspects = [entry.request.request_id for entry in self._journal if entry.is_suspect]
        # First the one that was probed when the last engine died: then it is alone.
        self._waiting = deque(sorted(suspects, key=lambda request_id: request_id != self._probe))
        self._probe = None
        return self._next_to_send()

    def sent(self, entry: JournalEntry) -> None:
        """Record that a request is sent to the engine process."""
        entry.entered_process = self._process_number
        entry.num_since_entry = 0
        self._num_sent += 1

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
                self._journal.close(entry.request.request_id)
                logger.error(
                    "request %s was running in %d engine deaths: rejected", entry.request.request_id, entry.num_deaths
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
            if entry is not None and entry.is_suspect:  # its id may be a new request's by now
                self._probe = entry.request.request_id
                return [entry]
        self._probe = None
        return [entry for entry in self._journal if entry.entered_process != self._process_number]

    def _in_last_steps(self, flight: FlightRecord) -> list[JournalEntry]:
        """Return the requests in the steps of a death: all that the engine was sent, if none of them is known."""
        sent = [entry for entry in self._journal if entry.entered_process == self._process_number]
        keys = set(flight.keys.tolist()) if flight.steps_begun else set()
        found = [e for e in sent if any(request_key(i) in keys for i in self._journal.engine_ids(e.request.request_id))]
        return found or sent
