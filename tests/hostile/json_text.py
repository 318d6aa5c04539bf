"""JSON as an attacker writes it: also what is not JSON, in the middle of what is."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes written as they are: `Raw(b"1e999")`, or a string whose bytes are not UTF-8."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Pairs:
    """An object whose names may repeat."""

    items: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Flood:
    """`count` times `entry`, in an array: written without building it. `fresh` numbers the entries: {} becomes i."""

    entry: Any
    count: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class FloodOfKeys:
    """An object of `count` names, each with the same value."""

    value: Any
    count: int


@dataclass(frozen=True, slots=True)
class Deep:
    """`depth` arrays (or objects) around each other."""

    depth: int
    as_objects: bool = False


def write(value: Any) -> bytes:
    """The value as JSON text. Lone surrogates are written as escapes, everything of this module as it says."""
    match value:
        case Raw():
            return value.text
        case Pairs():
            return b"{" + b",".join(write(name) + b":" + write(one) for name, one in value.items) + b"}"
        case Flood():
            one = write(value.entry)
            if value.fresh:
                return b"[" + b",".join([one.replace(b"{}", b"%d" % i) for i in range(value.count)]) + b"]"
            return b"[" + (one + b",") * (value.count - 1) + one + b"]" if value.count else b"[]"
        case FloodOfKeys():
            one = write(value.value)
            return b"{" + b",".join([b'"%d":%s' % (i, one) for i in range(value.count)]) + b"}"
        case Deep():
            opening, closing = (b'{"a":', b"}") if value.as_objects else (b"[", b"]")
            return opening * value.depth + b"1" + closing * value.depth
        case dict():
            return b"{" + b",".join(write(name) + b":" + write(one) for name, one in value.items()) + b"}"
        case list() | tuple():
            return b"[" + b",".join([write(one) for one in value]) + b"]"
        case _:
            return json.dumps(value).encode()
