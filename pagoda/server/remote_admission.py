"""Admission of the requests of several processes by the one Admission that their parent has.

A request costs one call that is waited for (`enter`); what follows is posted, but for what may be refused. Places that
a process leaves behind are closed.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import msgspec

from pagoda.engine.clients.calls import Calls, offered
from pagoda.server.admission import (
    PRIOR_OUTPUT_TOKENS,
    Admission,
    AdmissionCounts,
    Place,
    expected_output,
)
from pagoda.server.errors import ApiError


class Entered(msgspec.Struct, frozen=True):
    """A request that was let in.   is_in_line: it waits for its turn.   mean_output: see Admission."""

    is_in_line: bool
    mean_output: float


class AdmissionService:
    """Admits the requests of other processes, each of which numbers its own."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._places: dict[tuple[int, int], Place] = {}
        self._clients: set[int] = set()
        self._waits: dict[tuple[int, int], asyncio.Task[object]] = {}  # for a turn, or for room

    def has_admitted(self, client: int) -> bool:
        """Return whether a process has had a request, until it has gone."""
        return client in self._clients

    def end_client(self, client: int) -> None:
        """Close the places of a process that has gone."""
        self._clients.discard(client)
        for key in [key for key in self._places if key[0] == client]:
            self._close(key)

    @offered
    def enter(self, client: int, number: int, num_requests: int, num_tokens: int, key: str) -> Entered:
        place = self._admission.enter(num_requests, num_tokens, key)
        self._places[client, number] = place
        self._clients.add(client)
        return Entered(place.is_in_line, self._admission.mean_output)

    @offered
    async def wait_for_turn(self, client: int, number: int) -> None:
        await self._wait((client, number), Place.wait_for_turn)

    @offered
    async def keep(self, client: int, number: int, num_media_bytes: int, num_logprobs: int) -> None:
        await self._wait((client, number), lambda place: place.keep(num_media_bytes, num_logprobs))

    @offered
    async def wait_to_hold(self, client: int, number: int, num_media_bytes: int) -> None:
        await self._wait((client, number), lambda place: place.wait_to_hold(num_media_bytes))

    async def _wait(self, key: tuple[int, int], wait: Callable[[Place], Awaitable[None]]) -> None:
        """Wait, unless the place is closed meanwhile, or was closed before this began: then no one reads the answer."""
        if (place := self._places.get(key)) is None:
            return
        task = asyncio.current_task()
        assert task is not None
        self._waits[key] = task
        try:
            await wait(place)
        finally:
            del self._waits[key]

    def _close(self, key: tuple[int, int]) -> None:
        if (wait := self._waits.get(key)) is not None:
            wait.cancel()
        if (place := self._places.pop(key, None)) is not None:
            place.close()

    @offered
    def correct(self, client: int, number: int, num_tokens: int) -> None:
        self._places[client, number].correct(num_tokens)

    @offered
    def start(self, client: int, number: int) -> None:
        self._places[client, number].start()

    @offered
    def close(self, client: int, number: int) -> None:
        self._close((client, number))

    @offered
    def note_output(self, client: int, num_tokens: float) -> None:
        self._admission.note_output(num_tokens)

    @offered
    def counts(self, client: int) -> AdmissionCounts:
        return self._admission.counts

    @offered
    def end_line(self, client: int, status: int, message: str, retry_after_s: int | None, key: str | None) -> None:
        self._admission.end_line(ApiError(status, message, retry_after_s=retry_after_s), key)


class RemotePlace:
    """A Place that the parent process counts."""

    def __init__(self, calls: Calls, number: int, key: str, arrived_s: float) -> None:
        self._calls, self._number = calls, number
        self._has_started = self._holds = False
        self.key, self.arrived_s = key, arrived_s
        self.is_in_line = False
        self.at_end = ExitStack()
        self.at_end.callback(calls.tell, AdmissionService.close, number)

    async def wait_for_turn(self) -> None:
        await self._calls.ask(AdmissionService.wait_for_turn, self._number)

    async def wait_to_hold(self, num_media_bytes: int) -> None:
        self._holds = True
        await self._calls.ask(AdmissionService.wait_to_hold, self._number, num_media_bytes)

    def correct(self, num_tokens: int) -> None:
        self._calls.tell(AdmissionService.correct, self._number, num_tokens)

    async def keep(self, num_media_bytes: int, num_logprobs: int = 0) -> None:
        if num_media_bytes or num_logprobs or self._holds:
            self._holds = True
            await self._calls.ask(AdmissionService.keep, self._number, num_media_bytes, num_logprobs)

    def start(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._calls.tell(AdmissionService.start, self._number)


class RemoteAdmission:
    """The Admission of the parent process."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._numbers = itertools.count(1)
        self._mean_output = float(PRIOR_OUTPUT_TOKENS)  # until the first request is admitted

    def expected_output(self, max_tokens: int | None) -> int:
        return expected_output(self._mean_output, max_tokens)

    def note_output(self, num_tokens: float) -> None:
        self._calls.tell(AdmissionService.note_output, num_tokens)

    async def admit(self, num_requests: int, num_tokens: int, key: str) -> RemotePlace:
        number = next(self._numbers)
        place = RemotePlace(self._calls, number, key, time.perf_counter())
        with contextlib.ExitStack() as guard:  # also if its client leaves before there is an answer
            guard.push(place.at_end)
            entered = await self._calls.ask(AdmissionService.enter, number, num_requests, num_tokens, key)
            guard.pop_all()
        place.is_in_line = entered.is_in_line
        self._mean_output = entered.mean_output
        return place

    def end_line(self, error: ApiError, key: str | None = None) -> None:
        self._calls.tell(AdmissionService.end_line, error.status, error.message, error.retry_after_s, key)

    async def read_counts(self) -> AdmissionCounts:
        return await self._calls.ask(AdmissionService.counts)


AnyAdmission = Admission | RemoteAdmission
AnyPlace = Place | RemotePlace
