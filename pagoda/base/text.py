"""Strings from outside: what UTF-8 cannot encode is refused where it comes in."""

from pagoda.base.errors import RequestError


def check_encodable(name: str, text: str) -> None:
    """Raise RequestError, naming the input, for a string with a lone surrogate: no tokenizer and no wire takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"{text[error.start]!r} at character {error.start}"
        raise RequestError(f"{name} is not valid Unicode: {bad} is half of a surrogate pair", name) from None


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
