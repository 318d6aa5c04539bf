"""What every answer must be, whatever was asked."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.hostile.case import Case, Expect, Leave
from tests.hostile.client import Answer, Outcome

MAX_ERROR_BYTES = 4_096
_STATUSES = {200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 429, 431, 501}
_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\d+""")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with an answer, or with the server.

    kind: equal for two problems that are the same but for the values of the cases that show them.
    """

    kind: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.details}" if self.details else self.kind


def problems(case: Case, outcome: Outcome, may_be_down: bool = False) -> list[Problem]:
    """What is wrong with the outcome of a case; empty when nothing is.

    may_be_down: 503 is an answer, too: the engine starts again, or the server drains.
    """
    found = [Problem(outcome.problem)] if outcome.problem else []
    for answer in outcome.answers:
        if answer.is_whole or case.leave is not Leave.HALF:  # to the server, a client that half-closes has left
            found += answer_problems(answer, may_be_down)
    statuses = [answer.status for answer in outcome.answers]
    if case.expect is Expect.ANSWERS and not outcome.problem:
        # What the HTTP parser itself, or a limit, refuses ends the connection: nothing after it is answered.
        refused = outcome.was_closed and statuses[-1:] and 400 <= statuses[-1] < 500
        if len(statuses) != case.num_answers and not refused:
            amount = "too few" if len(statuses) < case.num_answers else "too many"
            kind = f"{amount} answers, of status {sorted(set(statuses))}"
            found.append(Problem(kind, f"{len(statuses)} to {case.num_answers} requests: {statuses}"))
    if case.expect is Expect.REFUSED and not outcome.problem and (statuses or [0])[-1] not in (408, 400, 0):
        found.append(Problem(f"a request that was never complete was answered {statuses}"))
    return found


def answer_problems(answer: Answer, may_be_down: bool = False) -> list[Problem]:
    """What is wrong with one answer, whatever it is an answer to."""
    if not answer.is_whole:
        return [Problem(f"an answer of status {answer.status} was cut", f"after {len(answer.body)} bytes")]
    if may_be_down and answer.status == 503:
        has_time = "retry-after" in answer.headers
        return _error_problems(answer) + ([] if has_time else [Problem("a 503 without Retry-After")])
    if answer.status not in _STATUSES:
        return [Problem(f"status {answer.status}, {_said(answer.body)}", f"{answer.body[:300]!r}")]
    if answer.status >= 400:
        return _error_problems(answer)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _stream_problems(answer.body)
    return []


def _error_problems(answer: Answer) -> list[Problem]:
    found = []
    if len(answer.body) > MAX_ERROR_BYTES:
        kind = f"an error of status {answer.status} that is too long, {_said(answer.body)}"
        found.append(Problem(kind, f"{len(answer.body)} bytes: {answer.body[:200]!r}"))
    if answer.headers.get("x-should-retry") != "false" and answer.status == 501:
        found.append(Problem("a 501 without x-should-retry: false"))
    return found + (_shape_problems(answer.body, answer.status) if answer.has_body else [])


def _said(body: bytes) -> str:
    """The message of an error without the values in it: of any body, its beginning."""
    text = body[:10_000].decode("latin-1")
    try:
        data: Any = json.loads(body)
        text = str(data["error"]["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return _VALUES.sub("_", text)[:200]


def _shape_problems(body: bytes, status: int) -> list[Problem]:
    """OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""
    try:
        data: Any = json.loads(body)
        error = data["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
    except (ValueError, KeyError, TypeError, AssertionError):
        return [Problem(f"an error of status {status} not in OpenAI's shape, {_said(body)}", f"{body[:300]!r}")]
    if "internal error" in error["message"] or "Traceback" in error["message"]:
        return [Problem(f"an error that does not say what is wrong, {_said(body)}", f"{error['message'][:200]!r}")]
    return []


def _stream_problems(body: bytes) -> list[Problem]:
    events = body.decode().split("\n\n")
    if events[-1] or events[-2] != "data: [DONE]":
        return [Problem("a stream that does not end with [DONE]", f"{body[-100:]!r}")]
    for event in events[:-2]:
        data = json.loads(event.removeprefix("data: "))
        if "error" in data:
            sent = event.removeprefix("data: ").encode()
            found = _shape_problems(sent, 200)
            if not found and data["error"]["code"] >= 500:
                found = [Problem(f"an error in a stream, {_said(sent)}", event[:300])]
            return found
    return []
