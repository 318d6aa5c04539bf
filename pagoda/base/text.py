"""Checks for strings from callers: those that UTF-8 cannot encode are rejected on input."""

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
