"""Answer the lines of a batch file: the app of all routes in this process, called without HTTP."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from pagoda.base.server_config import MAX_HELD_BODY_BYTES, ServerLimits
from pagoda.server.batches.lines import Answer, InputLine, Journal, LineError, OutputLine, read_lines
from pagoda.server.sending import on_thread

logger = logging.getLogger("pagoda.server")

LIMITS = ServerLimits(max_queued_requests=0, max_queued_tokens=0)
"""Bodies are limited as over HTTP; what waits is limited by the lines in flight."""
MAX_LINE_BYTES = LIMITS.max_body_bytes + 64 * 2**10
_MAX_IN_FLIGHT_BYTES = MAX_HELD_BODY_BYTES // 2
_RETRY_S = 10.0
"""After so long, a line that found the server full is sent again, whether or not another one has ended."""
_UNAVAILABLE, _FULL = 503, 429


class Unanswered(Exception):
    """A line has no answer in this run."""


@dataclass(frozen=True, slots=True)
class AppCaller:
    """Calls the app of all routes as one caller.

    raise_if_dead: raises if the engine is gone, so that what it can no longer answer is left for another run;
    Unanswered, if that holds for one line, and others may still have their answers.
    headers: of each call.   scope: what else its scope has.   prefix: of the ids of requests.
    """

    app: ASGIApp
    raise_if_dead: Callable[[], None]
    headers: tuple[tuple[bytes, bytes], ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prefix: str = ""


async def answer_lines(
    caller: AppCaller,
    lines: Iterable[InputLine],
    journal: Journal,
    has_room: Callable[[InputLine, Collection[InputLine]], bool],
    on_line: Callable[[], object],
) -> None:
    """Write the answer of each line to the journal as it comes; read no further while there is no room for a line.

    has_room: says so, from those in flight.   on_line: called after each.
    Files are read and written on threads: what that takes grows with a line.
    """
    running: dict[asyncio.Task[OutputLine], InputLine] = {}
    asking, waiting = _Asking(caller), iter(lines)

    async def write_some() -> None:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del running[task]
        answers = [task.result() for task in done if not isinstance(task.exception(), Unanswered)]
        await on_thread(lambda: [journal.write(answer) for answer in answers])
        for _ in answers:
            on_line()

    try:
        while (line := await on_thread(lambda: next(waiting, None))) is not None:
            while running and not (has_room(line, running.values()) and _num_bytes(running) <= _MAX_IN_FLIGHT_BYTES):
                await write_some()
            running[asyncio.create_task(asking.answer(line))] = line
        while running:
            await write_some()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def unanswered(path: Path, journal: Journal) -> Iterator[InputLine]:
    """Iterate over the lines of an input file that have no answer yet."""
    return (line for line in read_lines(path, MAX_LINE_BYTES) if not journal.has(line))


def _num_bytes(running: Mapping[Any, InputLine]) -> int:
    return sum(len(one.body) for one in running.values())


class _Asking:
    """Gets the answers to lines. One that finds the server full is sent again when another one has ended."""

    def __init__(self, caller: AppCaller) -> None:
        self._caller = caller
        self._has_room = asyncio.Condition()
        self._num_ended = 0

    async def answer(self, line: InputLine) -> OutputLine:
        """Return the answer to a line."""
        if line.error is not None:
            return OutputLine(line.id, line.custom_id, None, line.error)
        exchange = await self._call(line)
        if exchange.status == _UNAVAILABLE:
            self._caller.raise_if_dead()
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        if not kind.startswith("application/json"):
            error = LineError("unsupported_answer", f"the answer is {kind}, not JSON: ask for JSON")
            return OutputLine(line.id, line.custom_id, None, error)
        answer = Answer(exchange.status, f"{self._caller.prefix}{line.id}", msgspec.Raw(exchange.body))
        return OutputLine(line.id, line.custom_id, answer, None)

    async def _call(self, line: InputLine) -> "_Exchange":
        while True:
            num_ended = self._num_ended
            exchange = await _Exchange.run(self._caller, line)
            async with self._has_room:
                if exchange.status != _FULL:
                    self._num_ended += 1
                    self._has_room.notify()  # one line only: each reads its body and images again
                    return exchange
                if num_ended == self._num_ended:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_RETRY_S):
                            await self._has_room.wait()


class _Exchange:
    """One request to the app, and its response."""

    def __init__(self, line: InputLine) -> None:
        self._line = line
        self._has_sent = False
        self._has_ended = asyncio.Event()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    @classmethod
    async def run(cls, caller: AppCaller, line: InputLine) -> "_Exchange":
        """Send a line to its route; return when the response is complete."""
        exchange = cls(line)
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.path,
            "raw_path": line.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"x-request-id", f"{caller.prefix}{line.id}".encode()),
                *caller.headers,
            ],
            **caller.scope,
        }
        try:
            await caller.app(scope, exchange._receive, exchange._send)
        except Exception:  # the routes' app has answered with a 500, and raises for a server's log
            if not exchange.status:
                raise
            logger.exception("line %d", line.number)
        return exchange

    async def _receive(self) -> Message:
        if self._has_sent:
            await self._has_ended.wait()
            return {"type": "http.disconnect"}
        self._has_sent = True
        return {"type": "http.request", "body": self._line.body}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message.get("headers", ()))
        else:
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                self._has_ended.set()
