"""Checks for strings from callers: those that UTF-8 cannot encode are rejected on input.

JSON that models write may have such strings, too: they are mended.
"""

import json
import re
from typing import Any

from pagoda.base.errors import RequestError


def check_encodable(name: str, text: str) -> None:
    """Raise RequestError, naming the input, for a string with a lone surrogate, which cannot be tokenised or sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"{text[error.start]!r} at character {error.start}"
        raise RequestError(f"{name} is not valid Unicode: {bad} is half of a surrogate pair", name) from None


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode `text`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_INTEGER = re.compile("-?[0-9]{1,18}")


def as_integer(text: str) -> int | None:
    """Return the integer that a caller wrote; None for another text.

    Python's own `int` also takes the digits of other scripts, spaces, `_` and `+`.
    """
    return int(text) if _INTEGER.fullmatch(text) else None


def encodable(text: str) -> str:
    """Return `text` with U+FFFD for halves of surrogate pairs, and the whole character for two that belong together."""
    return text if is_encodable(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encodable_json(text: str) -> Any:
    """Return the value of JSON, whose strings UTF-8 can encode. Raises ValueError if it is not JSON."""
    value = json.loads(text)
    return json.loads(encodable(json.dumps(value, ensure_ascii=False))) if "\\u" in text else value
