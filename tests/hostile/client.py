"""A client that sends a case as it is and reads what comes back, one answer after another."""

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field

from tests.hostile.case import Case, Expect, Leave

ANSWER_TIMEOUT_S = 15.0
REAL_ANSWER_TIMEOUT_S = 120.0  # a real model generates up to 2,000 tokens for one answer, next to others
TIME_PER_ANSWER_S = 0.03  # in thousands of a pipeline, on a machine that is busy with more than this
NO_ANSWER = "no complete answer in time"
_PART = 2**18  # what is sent at once


@dataclass(slots=True)
class Answer:
    """One HTTP answer.   is_whole: it ended as its head said.   has_body: False for an answer to HEAD."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool
    has_body: bool = True


@dataclass(slots=True)
class Outcome:
    """What came of a case.   took_s: until its client left.   problem: what the client itself met."""

    answers: list[Answer] = field(default_factory=list)
    was_closed: bool = False
    took_s: float = 0.0
    problem: str = ""


async def send_case(case: Case, port: int, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> Outcome:
    """Send it over a connection of its own, and leave as it says."""
    outcome = Outcome()
    began_s = time.monotonic()
    try:
        most_s = answer_timeout_s + case.pause_s * len(case.pieces) + TIME_PER_ANSWER_S * case.num_answers
        async with asyncio.timeout(most_s):
            await _talk(case, port, outcome)
    except TimeoutError:
        outcome.problem = NO_ANSWER
    except OSError as error:
        outcome.was_closed = True
        outcome.problem = "" if isinstance(error, ConnectionError) else repr(error)
    outcome.took_s = time.monotonic() - began_s
    return outcome


async def _talk(case: Case, port: int, outcome: Outcome) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    sending = asyncio.create_task(_send(case, writer))
    try:
        if case.leave in (Leave.AT_ONCE, Leave.RESET):
            await sending
            if case.leave is Leave.RESET:
                _reset_on_close(writer)
        elif case.leave is Leave.AFTER_BYTES:
            await reader.read(100)
        else:
            await _read_answers(case, reader, outcome)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _send(case: Case, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # an answer may come, and the connection end, before all is sent
        for i, piece in enumerate(case.pieces):
            if i and case.pause_s:
                await asyncio.sleep(case.pause_s)
            for at in range(0, len(piece), _PART):
                writer.write(piece[at : at + _PART])
                await writer.drain()
        if case.leave is Leave.HALF:
            writer.write_eof()


async def _read_answers(case: Case, reader: asyncio.StreamReader, outcome: Outcome) -> None:
    is_head = any(piece.startswith(b"HEAD ") for piece in case.pieces[:1])
    wants_close = case.leave in (Leave.CLOSED, Leave.HALF)
    wait_s = None
    while wants_close or len(outcome.answers) < case.num_answers:
        try:
            answer = await _read_answer(reader, is_head, wait_s)
        except _Silence:
            return
        if answer is None:
            outcome.was_closed = True
            return
        if answer.status >= 200:
            outcome.answers.append(answer)
        if not answer.is_whole or answer.headers.get("connection") == "close":
            outcome.was_closed = not answer.is_whole or not await reader.read(1)
            return
        if wants_close and len(outcome.answers) >= 20:
            return
        if wants_close and case.expect is Expect.ANSWERS_OR_CLOSE:
            wait_s = 0.3  # whether more comes depends on how the server reads the garbage


class _Silence(Exception):
    """No further answer began."""


async def _read_answer(reader: asyncio.StreamReader, is_head: bool, wait_s: float | None) -> Answer | None:
    """The next answer; None when the connection has ended before one began.

    Raises _Silence if none has begun `wait_s` from now (None: waits for ever).
    """
    waiting = asyncio.timeout(wait_s)
    try:
        async with waiting:
            head = await reader.readuntil(b"\r\n\r\n")
    except TimeoutError:
        if waiting.expired():
            raise _Silence from None
        raise
    except asyncio.IncompleteReadError as error:
        return Answer(0, {}, error.partial, False) if error.partial else None
    status_line, *lines = head[:-4].decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    answer = Answer(int(status_line.split(" ", 2)[1]), headers, b"", True)
    answer.has_body = not is_head
    if is_head or answer.status in (204, 304) or answer.status < 200:
        return answer
    try:
        if headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
            await reader.readexactly(2)
            answer.body = b"".join(parts)
        elif "content-length" in headers:
            answer.body = await reader.readexactly(int(headers["content-length"]))
        else:
            answer.body = await reader.read()
    except asyncio.IncompleteReadError as error:
        answer.body, answer.is_whole = error.partial, False
    return answer


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
