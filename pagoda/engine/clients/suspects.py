"""Suspects: find the request that kills engine processes, and reject only that one.

Suspects are the requests in the step during which an engine died. The next engine gets them one at a time, each after
the previous one has cleared itself; other requests run next to them. If an engine dies during such a probe, the one
after it gets nothing but suspects until all have cleared themselves, first the one that was probed. Only a suspect that
kills an engine which was sent nothing else is known for certain to be the cause.
"""

import logging
from collections import deque

from pagoda.engine.clients.journal import Journal, JournalEntry
from pagoda.engine.flight_recorder import FlightRecord, request_key

logger = logging.getLogger("pagoda.engine")

MAX_DEATHS = 5  # for kills from outside, and for requests that kill an engine later than a probe can tell


class Suspects:
    """The suspects among a journal's entries, which one of them is being probed, and who must wait for them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._process_number = 0
        self._num_sent = 0  # requests sent to this engine process
        self._waiting: deque[str] = deque()
        self._probe: str | None = None
        self._last_probe: str | None = None  # the suspect that was probed when the previous engine died
        self._only_suspects = False

    @property
    def is_probing(self) -> bool:
        """Whether a suspect is in the engine and had not cleared itself when `next` was last called."""
        return self._probe is not None

    @property
    def hold_others(self) -> bool:
        """Whether requests that are no suspects must wait: `next` returns them once all suspects are cleared."""
        return self._only_suspects

    def begin(self, process_number: int) -> list[JournalEntry]:
        """Begin with a new engine process. Return the requests to send to it now, in this order."""
        self._process_number = process_number
        self._num_sent = 0
        self._probe = None
        suspects = [entry.request.request_id for entry in self._journal if entry.is_suspect]
        self._waiting = deque(sorted(suspects, key=lambda request_id: request_id != self._last_probe))
        self._only_suspects = self._last_probe in suspects
        return [*([] if self._only_suspects else self._not_sent()), *self._next_suspect()]

    def sent(self, entry: JournalEntry) -> None:
        """Record that a request is sent to the engine process."""
        entry.entered_process = self._process_number
        entry.num_since_entry = 0
        self._num_sent += 1

    def next(self) -> list[JournalEntry]:
        """Return the requests to send now: the next suspect, unless the last one has not cleared itself yet.

        After the last suspect, those that were held.
        """
        probed = self._journal.get(self._probe) if self._probe is not None else None
        if probed is not None and probed.is_suspect:
            return []
        found = self._next_suspect()
        if not found and self._only_suspects:
            self._only_suspects = False
            return self._not_sent()
        return found

    def assign_blame(self, flight: FlightRecord, killed_from_outside: bool) -> list[JournalEntry]:
        """Make the requests in the step of a death suspects. Remove and return those that are rejected.

        flight: of the dead engine.
        A suspect is rejected if the engine was sent nothing else, and any request after MAX_DEATHS deaths. A SIGKILL
        from outside (or from the kernel, out of memory) says little about the requests in the step: it only makes
        suspects and counts. A SIGKILL between two steps blames no request.
        """
        self._last_probe = None
        if killed_from_outside and flight.steps_begun == flight.steps_ended:
            return []
        rejected: list[JournalEntry] = []
        for entry in self._in_step(flight, killed_from_outside):
            request_id = entry.request.request_id
            entry.deaths.add(self._process_number)
            is_certain = entry.is_suspect and self._num_sent == 1 and not killed_from_outside
            if is_certain or len(entry.deaths) >= MAX_DEATHS:
                self._journal.close(request_id)
                logger.error("request %s was running in %d engine deaths: rejected", request_id, len(entry.deaths))
                rejected.append(entry)
            elif entry.is_suspect:
                self._last_probe = request_id
            entry.is_suspect = True
        for entry in self._journal:  # a rejected request explains the deaths that it took part in
            entry.deaths.difference_update(*(one.deaths for one in rejected))
        return rejected

    def _not_sent(self) -> list[JournalEntry]:
        """Return the entries that are no suspects and not in this engine process."""
        return [e for e in self._journal if not e.is_suspect and e.entered_process != self._process_number]

    def _next_suspect(self) -> list[JournalEntry]:
        """Return the first waiting suspect that has not ended, to be probed; an empty list if there is none."""
        self._probe = None
        while self._waiting:
            entry = self._journal.get(self._waiting.popleft())
            if entry is not None and entry.is_suspect:  # its id may be a new request's by now
                self._probe = entry.request.request_id
                return [entry]
        return []

    def _in_step(self, flight: FlightRecord, killed_from_outside: bool) -> list[JournalEntry]:
        """Return the requests in the step of a death.

        All that the engine was sent, if it died before its first step or if no request of its last step is left.
        """
        sent = [entry for entry in self._journal if entry.entered_process == self._process_number]
        keys = set(flight.keys.tolist())
        found = [e for e in sent if any(request_key(i) in keys for i in self._journal.engine_ids(e.request.request_id))]
        is_unknown = flight.steps_begun == 0 or not (found or killed_from_outside)
        return sent if is_unknown else found
