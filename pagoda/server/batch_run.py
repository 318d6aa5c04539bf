"""Run a batch file: the app of all routes in this process, called without HTTP, over an engine process."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Message

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.server_config import MAX_HELD_BODY_BYTES, ServerLimits
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.server.app import create_app
from pagoda.server.batch_files import Answer, InputLine, Journal, LineError, OutputLine, read_lines
from pagoda.server.state import build_state

logger = logging.getLogger("pagoda.server")

_LIMITS = ServerLimits(max_queued_requests=0, max_queued_tokens=0)
"""Bodies are limited as over HTTP; what waits is limited by the lines in flight."""
MAX_LINE_BYTES = _LIMITS.max_body_bytes + 64 * 2**10
_MAX_IN_FLIGHT_BYTES = MAX_HELD_BODY_BYTES // 2
_RETRY_S = 10.0
"""After so long, a line that found the server full is sent again, whether or not another one has ended."""
_UNAVAILABLE, _FULL = 503, 429


def survey(path: Path, journal: Journal) -> int:
    """Return how many lines an input file has. Raises ConfigError if it cannot be read or is not the journal's."""
    num_lines = num_done = 0
    for line in read_lines(path, MAX_LINE_BYTES):
        num_lines += 1
        num_done += journal.has(line)
    if num_done < journal.num_done:
        raise ConfigError(
            f"the output file has {journal.num_done} answers, {journal.num_done - num_done} of them to lines that "
            f"{path} does not have: give another output file"
        )
    return num_lines


async def answer_file(config: EngineConfig, path: Path, journal: Journal, on_line: Callable[[], object]) -> None:
    """Answer the lines of an input file that the journal does not have.   on_line: called after each.

    Raises ConfigError or CapacityError for invalid settings, WorkerDied if the engine cannot be started (again).
    """
    config = replace(config, server=replace(config.server, server_limits=_LIMITS))
    client = ProcessClient(config, step_timeout_s=config.server.server_timeouts.step_timeout_s)
    starting = asyncio.create_task(client.start())
    try:
        state = await build_state(config, client, lambda: starting)
        await state.model.adapters.load_modules(config.server.lora_sources)

        def raise_if_dead() -> None:
            if (died := client.died or state.starter.llm.died) is not None:
                raise died

        lines = (line for line in read_lines(path, MAX_LINE_BYTES) if not journal.has(line))
        max_in_flight = 2 * config.scheduler.max_num_seqs  # those that run, and the next ones
        try:
            await answer_lines(create_app(state, config.server), lines, journal, max_in_flight, raise_if_dead, on_line)
        finally:
            state.starter.llm.text.close()
            await asyncio.to_thread(state.peers.close)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await client.shutdown()


async def answer_lines(
    app: ASGIApp,
    lines: Iterable[InputLine],
    journal: Journal,
    max_in_flight: int,
    raise_if_dead: Callable[[], None],
    on_line: Callable[[], object],
) -> None:
    """Write the answer of each line to the journal as it comes; read no further while enough lines are in flight.

    raise_if_dead: raises if the engine is gone, so that what it can no longer answer is left for another run.
    """
    running: dict[asyncio.Task[OutputLine], int] = {}
    caller = _Caller(app, raise_if_dead)

    async def write_some() -> None:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del running[task]
            journal.write(task.result())
            on_line()

    try:
        for line in lines:
            while len(running) >= max_in_flight or sum(running.values()) > _MAX_IN_FLIGHT_BYTES:
                await write_some()
            running[asyncio.create_task(caller.answer(line))] = len(line.body)
        while running:
            await write_some()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Caller:
    """Gets the answers to lines. One that finds the server full is sent again when another one has ended.

    raise_if_dead: see `answer_lines`.
    """

    def __init__(self, app: ASGIApp, raise_if_dead: Callable[[], None]) -> None:
        self._app = app
        self._raise_if_dead = raise_if_dead
        self._has_room = asyncio.Condition()
        self._num_ended = 0

    async def answer(self, line: InputLine) -> OutputLine:
        """Return the answer to a line."""
        if line.error is not None:
            return OutputLine(line.id, line.custom_id, None, line.error)
        exchange = await self._call(line)
        if exchange.status == _UNAVAILABLE:
            self._raise_if_dead()
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        if not kind.startswith("application/json"):
            error = LineError("unsupported_answer", f"the answer is {kind}, not JSON: ask for JSON")
            return OutputLine(line.id, line.custom_id, None, error)
        answer = Answer(exchange.status, line.id, msgspec.Raw(exchange.body))
        return OutputLine(line.id, line.custom_id, answer, None)

    async def _call(self, line: InputLine) -> "_Exchange":
        while True:
            num_ended = self._num_ended
            exchange = await _Exchange.run(self._app, line)
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
    async def run(cls, app: ASGIApp, line: InputLine) -> "_Exchange":
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
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", line.id.encode())],
        }
        try:
            await app(scope, exchange._receive, exchange._send)
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
