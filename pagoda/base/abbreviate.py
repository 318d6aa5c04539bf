"""Values in error messages and logs: short, on one line, whatever the value is."""

import json
import re
import reprlib

_MAX_INT_BITS = 256
_PLAIN_VALUE = re.compile(r"[\w.:/+@%-]*", re.ASCII)


class _Abbreviation(reprlib.Repr):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = limit
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of more than 4300 digits.
        return repr(x) if x.bit_length() <= _MAX_INT_BITS else f"<integer of {x.bit_length()} bits>"

    def repr_str(self, x: str, level: int) -> str:
        if len(x) <= self.maxstring:
            return repr(x)
        return f"{x[: self.maxstring]!r}... ({len(x)} characters)"


def abbreviate(value: object, limit: int = 120) -> str:
    """Return the repr of `value` for an error message: strings cut to `limit` characters, containers to a few items.

    Never fails and never recurses deeper than three levels, so values from untrusted files can be passed.
    """
    return _Abbreviation(limit).repr(value)


def shorten(text: str, limit: int = 120) -> str:
    """Return `text` without quotes, cut to `limit` characters; the cut is marked and states the full length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def quoted(text: str) -> str:
    """Return `text` for a line of a log: in quotes if it could look like anything but one value."""
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def shown_id(request_id: str) -> str:
    """Return a request's id, which its caller may have chosen, for a line of a log or an error message."""
    return quoted(shorten(request_id))


def human_bytes(num_bytes: float) -> str:
    """`98362432` as `93.8 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
