"""Checks for strings from callers: those that UTF-8 cannot encode are rejected on input.

JSON that models write may have such strings, too: they are mended.
"""

import json
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


def encodable(text: str) -> str:
    """Return `text` with U+FFFD for halves of surrogate pairs, and the whole character for two that belong together."""
    return text if is_encodable(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encodable_json(text: str) -> Any:
    """Return the value of JSON, whose strings UTF-8 can encode. Raises ValueError if it is not JSON."""
    value = json.loads(text)
    return json.loads(encodable(json.dumps(value, ensure_ascii=False))) if "\\u" in text else value
