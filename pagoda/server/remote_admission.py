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

from pagoda.engine.clients.calls import Calls, Services
from pagoda.server.admission import (
    PRIOR_OUTPUT_TOKENS,
    Admission,
    AdmissionCounts,
    Place,
    Refusal,
    expected_output,
)
from pagoda.server.errors import ApiError, as_api_error


class Outcome(msgspec.Struct, frozen=True):
    """What came of a call.

    status, reason, message, retry_after_s: of the error that ends the request, if status is not 0.
    is_in_line: it waits for its turn.   mean_output: see Admission.
    """

    status: int = 0
    reason: str = ""
    message: str = ""
    retry_after_s: int | None = None
    is_in_line: bool = False
    mean_output: float = 0.0

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.reason:
            raise Refusal(self.reason, self.message, self.retry_after_s or 1)
        if self.status:
            raise ApiError(self.status, self.message, retry_after_s=self.retry_after_s)


def _outcome_of(error: Refusal | ApiError) -> Outcome:
    known = as_api_error(error)
    reason = error.reason if isinstance(error, Refusal) else ""
    return Outcome(known.status, reason, known.message, known.retry_after_s)


class AdmissionService:
    """Admits the requests of other processes, each of which numbers its own."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._places: dict[tuple[int, int], Place] = {}
        self._clients: set[int] = set()
        self._waits: dict[tuple[int, int], asyncio.Task[object]] = {}  # for a turn, or for room

    @property
    def services(self) -> Services:
        return {
            "admission.enter": self._enter,
            "admission.wait_for_turn": self._wait_for_turn,
            "admission.correct": lambda client, number, count: self._places[client, number].correct(count),
            "admission.keep": self._keep,
            "admission.wait_to_hold": self._wait_to_hold,
            "admission.start": lambda client, number: self._places[client, number].start(),
            "admission.close": lambda client, number: self._close((client, number)),
            "admission.note_output": lambda _, num_tokens: self._admission.note_output(num_tokens),
            "admission.end_line": self._end_line,
            "admission.counts": lambda _: self._admission.counts,
        }

    def has_admitted(self, client: int) -> bool:
        """Return whether a process has had a request, until it has gone."""
        return client in self._clients

    def end_client(self, client: int) -> None:
        """Close the places of a process that has gone."""
        self._clients.discard(client)
        for key in [key for key in self._places if key[0] == client]:
            self._close(key)

    def _enter(self, client: int, number: int, num_requests: int, num_tokens: int, key: str) -> Outcome:
        try:
            place = self._admission.enter(num_requests, num_tokens, key)
        except Refusal as error:
            return _outcome_of(error)
        self._places[client, number] = place
        self._clients.add(client)
        return Outcome(is_in_line=place.turn is not None, mean_output=self._admission.mean_output)

    async def _wait_for_turn(self, client: int, number: int) -> Outcome:
        return await self._wait((client, number), Place.wait_for_turn)

    async def _keep(self, client: int, number: int, num_media_bytes: int, num_logprobs: int) -> Outcome:
        return await self._wait((client, number), lambda place: place.keep(num_media_bytes, num_logprobs))

    async def _wait_to_hold(self, client: int, number: int, num_media_bytes: int) -> Outcome:
        return await self._wait((client, number), lambda place: place.wait_to_hold(num_media_bytes))

    async def _wait(self, key: tuple[int, int], wait: Callable[[Place], Awaitable[None]]) -> Outcome:
        """Wait, unless the place is closed meanwhile, or was before this came to run: then nobody wants the answer."""
        if (place := self._places.get(key)) is None:
            return Outcome()
        task = asyncio.current_task()
        assert task is not None
        self._waits[key] = task
        try:
            await wait(place)
        except (Refusal, ApiError) as error:
            return _outcome_of(error)
        finally:
            del self._waits[key]
        return Outcome()

    def _close(self, key: tuple[int, int]) -> None:
        if (wait := self._waits.get(key)) is not None:
            wait.cancel()
        if (place := self._places.pop(key, None)) is not None:
            place.close()

    def _end_line(self, _: int, status: int, message: str, retry_after_s: int | None, key: str | None) -> None:
        self._admission.end_line(ApiError(status, message, retry_after_s=retry_after_s), key)


class RemotePlace:
    """A Place that the parent process counts."""

    def __init__(self, calls: Calls, number: int, key: str, arrived_s: float) -> None:
        self._calls, self._number = calls, number
        self._has_started = self._holds = False
        self.key, self.arrived_s = key, arrived_s
        self.is_in_line = False
        self.at_end = ExitStack()
        self.at_end.callback(self._post, "close")

    async def wait_for_turn(self) -> None:
        await self.ask("wait_for_turn")

    async def wait_to_hold(self, num_media_bytes: int) -> None:
        self._holds = True
        await self.ask("wait_to_hold", num_media_bytes)

    def correct(self, num_tokens: int) -> None:
        self._post("correct", num_tokens)

    async def keep(self, num_media_bytes: int, num_logprobs: int = 0) -> None:
        if num_media_bytes or num_logprobs or self._holds:
            self._holds = True
            await self.ask("keep", num_media_bytes, num_logprobs)

    def start(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._post("start")

    async def ask(self, name: str, *arguments: object) -> Outcome:
        """Call a function of AdmissionService for this place. Raises Refusal, or the error that ends the line."""
        outcome = await self._calls.call(f"admission.{name}", self._number, *arguments, returns=Outcome)
        outcome.check()
        return outcome

    def _post(self, name: str, *arguments: object) -> None:
        self._calls.post(f"admission.{name}", self._number, *arguments)


class RemoteAdmission:
    """The Admission of the parent process."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._numbers = itertools.count(1)
        self._mean_output = float(PRIOR_OUTPUT_TOKENS)  # until the first request is admitted

    def expected_output(self, max_tokens: int | None) -> int:
        return expected_output(self._mean_output, max_tokens)

    def note_output(self, num_tokens: float) -> None:
        self._calls.post("admission.note_output", num_tokens)

    async def admit(self, num_requests: int, num_tokens: int, key: str) -> RemotePlace:
        place = RemotePlace(self._calls, next(self._numbers), key, time.perf_counter())
        with contextlib.ExitStack() as guard:  # also if its client leaves before there is an answer
            guard.push(place.at_end)
            outcome = await place.ask("enter", num_requests, num_tokens, key)
            guard.pop_all()
        place.is_in_line = outcome.is_in_line
        self._mean_output = outcome.mean_output
        return place

    def end_line(self, error: ApiError, key: str | None = None) -> None:
        self._calls.post("admission.end_line", error.status, error.message, error.retry_after_s, key)

    async def read_counts(self) -> AdmissionCounts:
        return await self._calls.call("admission.counts", returns=AdmissionCounts)


AnyAdmission = Admission | RemoteAdmission
AnyPlace = Place | RemotePlace
