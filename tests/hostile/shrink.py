"""Make a failing case smaller: drop fields, items and bytes for as long as it still fails in the same way."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.hostile.case import Case
from tests.hostile.checks import Problem

MAX_TRIES = 400
_LENGTH = re.compile(rb"(?i)(content-length: *)(\d+)")


def shrink(case: Case, failure: Callable[[Case], Problem | None], kind: str, max_tries: int = MAX_TRIES) -> Case:
    """Return the smallest case found with a failure of this kind, by trying at most `max_tries` smaller ones.

    Where it had one, a body keeps its correct Content-Length.
    """
    num_tries = 0
    improved = True
    while improved:
        improved = False
        for data in _smaller(b"".join(case.pieces)):
            if num_tries == max_tries:
                return case
            num_tries += 1
            candidate = replace(case, pieces=(data,))
            if candidate.num_bytes >= case.num_bytes:
                continue
            found = failure(candidate)
            if found is not None and found.kind == kind:
                case, improved = candidate, True
                break
    return case


def _smaller(data: bytes) -> Iterator[bytes]:
    """Yield smaller versions of what is sent: of the JSON body, then of the bytes, large cuts first."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    has_length = length is not None and int(length[2]) == len(body)

    def with_body(smaller: bytes) -> bytes:
        return (_LENGTH.sub(b"\\g<1>%d" % len(smaller), head) if has_length else head) + end + smaller

    try:
        yield from (with_body(json.dumps(value).encode()) for value in _smaller_values(json.loads(body)))
    except (ValueError, RecursionError):  # the body is not JSON, or nested too deeply
        yield from (with_body(cut) for cut in _cuts(body))
    yield from (cut + end + body for cut in _cuts(head))


def _smaller_values(value: Any) -> Iterator[Any]:
    """Yield versions of a JSON value with something left out."""
    if isinstance(value, dict):
        for key in value:
            yield {other: item for other, item in value.items() if other != key}
        for key in value:
            yield from ({**value, key: smaller} for smaller in _smaller_values(value[key]))
    elif isinstance(value, list):
        yield from _cuts(value)
        for at in range(min(len(value), 20)):
            yield from ([*value[:at], smaller, *value[at + 1 :]] for smaller in _smaller_values(value[at]))
    elif isinstance(value, str):
        yield from _cuts(value)


def _cuts(items: Any) -> Iterator[Any]:
    """Yield a sequence without each half of it, each quarter, and so on, down to single items."""
    size = len(items)
    while size > 1:
        size = (size + 1) // 2
        yield from (items[:at] + items[at + size :] for at in range(0, len(items), size))
