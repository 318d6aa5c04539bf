"""Suspects: find the request that kills engine processes, and reject only that one.

Suspects are the requests in the step during which an engine died. The next engine gets them one at a time, each after
the previous one has cleared itself, so that a request which kills the engine again is identified for certain.
"""

import logging
from collections import deque
from collections.abc import Iterator

from pagoda.engine.clients.journal import Journal, JournalEntry
from pagoda.engine.flight_recorder import FlightRecord, request_key

logger = logging.getLogger("pagoda.engine")

MAX_STRIKES = 2
MAX_DEATHS = 5  # for kills from outside, and for requests that kill an engine later than strikes can tell


class Suspects:
    """The suspects among a journal's entries, and which one of them is being probed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[str] = deque()
        self._probe: str | None = None

    @property
    def is_probing(self) -> bool:
        """Whether a suspect is in the engine and has not cleared itself when `next` was last called."""
        return self._probe is not None

    def set_apart(self) -> Iterator[JournalEntry]:
        """Begin with a new engine: yield the entries that are no suspects. The others wait for `next`."""
        self._probe = None
        self._waiting.clear()
        for entry in list(self._journal):
            if entry.is_on_probation:
                self._waiting.append(entry.request.request_id)
            else:
                yield entry

    def next(self) -> JournalEntry | None:
        """Return the suspect to probe now, or None: the last one has not cleared itself, or none is left."""
        if self._probe is not None:
            entry = self._journal.get(self._probe)
            if entry is not None and entry.is_on_probation:
                return None
            self._probe = None
        while self._waiting:
            entry = self._journal.get(self._waiting.popleft())
            if entry is not None:
                self._probe = entry.request.request_id
                return entry
        return None

    def assign_blame(self, flight: FlightRecord, process_number: int, killed_from_outside: bool) -> list[JournalEntry]:
        """Give a strike to each request in the step of a death. Remove and return those with too many.

        flight: of the dead engine, which was the one with this `process_number`.
        A SIGKILL from outside (or from the kernel, out of memory) says little about the requests in the step: they
        become suspects, but only MAX_DEATHS such deaths end a request. A SIGKILL between two steps blames none.
        """
        if killed_from_outside and flight.steps_begun == flight.steps_ended:
            return []
        in_step = set(flight.keys.tolist())
        rejected: list[JournalEntry] = []
        for entry in list(self._journal):
            request_id = entry.request.request_id
            was_in_step = any(request_key(i) in in_step for i in self._journal.engine_ids(request_id))
            # If the engine died before its first step, every request that had entered is a suspect.
            if entry.entered_process != process_number or not (was_in_step or flight.steps_begun == 0):
                continue
            # While one suspect is probed, do not blame others in the batch.
            if self._probe is not None and request_id != self._probe:
                continue
            entry.num_deaths += 1
            entry.strikes = 1 if killed_from_outside else entry.strikes + 1
            if entry.strikes >= MAX_STRIKES or entry.num_deaths >= MAX_DEATHS:
                self._journal.close(request_id)
                logger.error("request %s was running in %d engine deaths: rejected", request_id, entry.num_deaths)
                rejected.append(entry)
        return rejected
