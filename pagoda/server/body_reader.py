"""BodyReader: read bodies of requests into typed structs, with errors that name the invalid input."""

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.requests import Request

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.text import is_encodable
from pagoda.server.body import NEUTRAL, Body, either
from pagoda.server.request_state import request_state

logger = logging.getLogger("pagoda.server")

B = TypeVar("B", bound=Body)
T = TypeVar("T")

MAX_BODY_VALUES = 1_000_000
MAX_BODY_EXPONENTS = 10_000
_UNSAID_TYPES = ("", "application/x-www-form-urlencoded")
_INLINE_BYTES = 8 * 2**10
"""Larger bodies are parsed on a thread."""
MAX_SHOWN_CHARS = 100
"""Most characters of a caller's text that an error message repeats."""
_SEARCHED_BYTES = 64 * 2**10
"""Only in bodies up to this size is the invalid string searched for."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_PLACE = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_PLACE_CHARS = 4_096
"""A place is among so many characters at the end of msgspec's messages, which may repeat megabytes of the input."""
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)
_WRONG_WORD = re.compile(r"`(\w+)`: (expected .*)$", re.DOTALL)  # of Body.__post_init__
_IS_REQUIRED = ": is required"
_TYPE_LIST = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class BodyReader:
    """Reads the bodies of requests, and says once of each unknown field that it is ignored.

    is_strict: refuse unknown fields instead. Fields that only give hints (HINTS) are accepted either way.
    """

    def __init__(self, limits: RequestLimits, is_strict: bool = False) -> None:
        self._limits = limits
        self._is_strict = is_strict
        self._logged: set[str] = set()

    async def read(self, http: Request, kind: type[B]) -> B:
        """Read and parse the request's body. Raises RequestError if it is invalid, HTTPException as the Gate does."""
        data = await self._bytes_of(http)

        def parse() -> tuple[B, list[str], int]:
            try:
                body = parse_body(data, kind, self._limits)
            except RequestError as error:
                if str(error).endswith(_IS_REQUIRED):
                    unknown_fields(data, kind)  # a field that is not served may be given in place of the missing one
                raise
            unknown = unknown_fields(data, kind)
            return body, unknown[:_MAX_LOOKED_AT], len(unknown)

        body, unknown, num_unknown = await run_for_body(http, parse)
        if unknown:
            self.note_unknown(http, unknown, num_unknown)
        if left_out := body.left_out():
            self._note(http, left_out, len(left_out))
        return body

    async def find_field(self, http: Request, names: tuple[str, ...]) -> str | None:
        """Return the first of these fields that the request's body has, or None.

        Raises RequestError if it is not a JSON object.
        """
        data = await self._bytes_of(http)
        given = await run_for_body(http, lambda: given_fields(data, names))
        return next((name for name in names if name in given), None)

    async def _bytes_of(self, http: Request) -> bytes:
        """Return the body of a request, noting its size. Raises RequestError if it is said not to be JSON."""
        data = await http.body()
        request_state(http).body_bytes = len(data)
        _check_content_type(http)
        return data

    def note_unknown(self, http: Request, names: list[str], num_names: int) -> None:
        """Note that fields are ignored, or refuse them if this server does.

        names: the first of `num_names`, of which a body may have hundreds of thousands.
        """
        if self._is_strict:
            name = _clip(names[0], MAX_SHOWN_CHARS)
            raise RequestError(f"this server does not support the field {name!r}", name)
        self._note(http, names, num_names)

    def _note(self, http: Request, names: list[str], num_names: int) -> None:
        """Name fields in the answer's header, and once in the log."""
        shown = [name for name in names if _HEADER_NAME.fullmatch(name)][:_MAX_HEADER_NAMES]
        rest = num_names - len(shown)
        known = request_state(http)
        noted = ", ".join((*shown, f"+{rest}") if rest else shown)
        known.ignored_fields = f"{known.ignored_fields}, {noted}" if known.ignored_fields else noted
        for name in shown:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.warning("%s of %s is not served here and ignored (logged once)", name, http.scope["path"][:100])


HINTS = frozenset(
    {"metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    | {"prediction", "verbosity", "cache_control", "include_obfuscation", "session_id", "service_tier"}
    | {"client_metadata"}  # of Codex: its version and its session
)
"""Fields that may be ignored in silence: an answer without regard to them is still the answer that was asked for."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_HEADER_NAMES = 20
_MAX_LOOKED_AT = 200
_MAX_LOGGED_NAMES = 100
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _check_content_type(http: Request) -> None:
    """Raise RequestError for another type than JSON, unless a program sent no type, or curl's default one."""
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_unsaid = content_type in _UNSAID_TYPES
    if not (is_unsaid or content_type == "application/json" or content_type.endswith("+json")):
        raise RequestError("the body is not a JSON object; send one with Content-Type: application/json")


async def run_for_body(http: Request, work: Callable[[], T]) -> T:
    """Return work(), which takes time that grows with the request's body: if that is large, on a thread."""
    return work() if request_state(http).body_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


def given_fields(data: bytes, names: tuple[str, ...]) -> set[str]:
    """Return which of these fields a JSON object has. Raises RequestError if it is not one."""
    try:
        given = _fields_decoder(names).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError("the body is not a JSON object") from None
    return {name for name in names if getattr(given, name) is not UNSET}


@functools.cache
def _fields_decoder(names: tuple[str, ...], value: Any = msgspec.Raw) -> "msgspec.json.Decoder[Any]":
    """Return what finds these fields and makes nothing of the others, however many there are.

    value: the type of the fields; if not given, they are not looked into.
    """
    return msgspec.json.Decoder(msgspec.defstruct("GivenFields", [(name, value, UNSET) for name in names]))


def unknown_fields(data: bytes, kind: type[Body], place: str = "") -> list[str]:
    """Return the fields of a JSON object that neither `kind` nor the bodies in its fields declare, and no HINTS.

    place: of the object in the request, in front of its fields' names.
    Raises RequestError for a field that is not served and has another than a neutral value, and for what `kind`, which
    passes over the fields that it does not declare, did not find: that a name or such a value cannot be decoded.
    """
    with _refusing_undecodable(data):
        given = _decode_names(data)
        _check_unserved(data, kind, given, place)
    known = _nested(kind)
    unknown = [place + name for name in given if not (name in known or name in HINTS or name in kind.unserved)]
    for name, inner in known.items():
        if inner is not None and (value := bytes(given.get(name, b"")))[:1] == b"{":
            unknown += unknown_fields(value, inner, f"{place}{name}.")
    return unknown


def _check_unserved(data: bytes, kind: type[Body], given: Iterable[str], place: str) -> None:
    """Raise RequestError if a field that is not served has another than a neutral value.   place: in front of names."""
    if kind.unserved.keys().isdisjoint(given):
        return
    values = _fields_decoder(tuple(kind.unserved), Any).decode(data)
    for name, field in kind.unserved.items():
        if getattr(values, name) not in (UNSET, *NEUTRAL, *field.neutral):
            raise RequestError(f"{place}{name}: this server does not support {field.what}", place + name)


@functools.cache
def _nested(kind: type[Body]) -> dict[str, type[Body] | None]:
    """Return the fields of a body, with the body that each of them holds, if any."""
    return {
        name: next(
            (one for one in (hint, *typing.get_args(hint)) if inspect.isclass(one) and issubclass(one, Body)), None
        )
        for name, hint in typing.get_type_hints(kind).items()
    }


def parse_body(data: bytes, kind: type[B], limits: RequestLimits) -> B:
    """Return a body from its bytes. Raises RequestError if it is invalid."""
    if len(data) > _INLINE_BYTES:
        _check_values(data)
    with _refusing_undecodable(data):
        body: B = _decoder(kind).decode(data)
        body.check(limits)
    return body


@contextlib.contextmanager
def _refusing_undecodable(data: bytes) -> Iterator[None]:
    """Raise RequestError, saying where and why, if what is decoded from `data` in this block cannot be."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _undecodable(data, error) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def parse_fields(fields: dict[str, Any], kind: type[B], limits: RequestLimits) -> B:
    """Return a body from the fields of a form, whose values are strings. Raises RequestError if it is invalid."""
    try:
        body: B = msgspec.convert(fields, kind, strict=False)
        body.check(limits)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    return body


def _check_values(data: bytes) -> None:
    """Raise RequestError for a body of so many values that decoding it would hold the GIL for more than 0.1 s.

    Also counts what looks like a value inside strings. numpy counts without the GIL.
    """
    text = np.frombuffer(data, np.uint8)
    num_values = sum(int(np.count_nonzero(text == ord(mark))) for mark in ",:[{")
    if num_values > MAX_BODY_VALUES:
        raise RequestError(f"the body: {num_values} commas, colons and brackets are more than {MAX_BODY_VALUES}")
    # "1e300" is beyond a double's fast conversions: it takes 300 times as long to decode as other numbers.
    after = np.flatnonzero((text[:-4] | 0x20) == ord("e")) + 1
    after += (text[after] == ord("+")) | (text[after] == ord("-"))
    is_large = np.logical_and.reduce([text[np.minimum(after + at, len(text) - 1)] - ord("0") < 10 for at in range(3)])
    if (num_large := int(np.count_nonzero(is_large))) > MAX_BODY_EXPONENTS:
        raise RequestError(f"the body: {num_large} numbers with large exponents are more than {MAX_BODY_EXPONENTS}")


@functools.cache
def _decoder(kind: type[Any]) -> "msgspec.json.Decoder[Any]":
    # Lenient, because clients send "5" for 5 and 1 for true.
    return msgspec.json.Decoder(kind, strict=False)


# ---- errors


def _explained(message: str) -> RequestError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.messages[3].role`" into an error that names the input first."""
    where = ""
    if match := _PLACE.search(message, max(len(message) - _PLACE_CHARS, 0)):
        where, message = _clip(match["path"].removeprefix(".")), message[: match.start()]
    if match := _MISSING_FIELD.match(message):
        where = f"{where}.{match[1]}" if where else match[1]
        return RequestError(f"{where}{_IS_REQUIRED}", where)
    if match := _WRONG_WORD.match(message):
        where = f"{where}.{match[1]}" if where else match[1]
        return RequestError(f"{where}: {_clip(match[2])}", where)
    message = _plain(message)
    if not where:
        return RequestError(f"the body is not a JSON object ({message}); send one with Content-Type: application/json")
    return RequestError(f"{where}: {message}", where)


def _undecodable(data: bytes, error: Exception) -> RequestError:
    """Return the error for undecodable bytes. If they contain a lone surrogate, name the string that has it."""
    if len(data) <= _SEARCHED_BYTES and _SURROGATE_ESCAPE.search(data):
        try:
            where = _lone_surrogate(json.loads(data), "")
        except (ValueError, RecursionError):
            where = None
        if where is not None:
            where = _clip(where)
            return RequestError(f"{where or 'the body'}: not valid Unicode: half of a surrogate pair", where or None)
    reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    return RequestError(f"the body is not valid JSON: {_clip(reason)}")


def _lone_surrogate(value: Any, path: str) -> str | None:
    """Return the path of the first string (or object with a key) that UTF-8 cannot encode, or None."""
    match value:
        case str() if not is_encodable(value):
            return path
        case dict():
            if not all(map(is_encodable, value)):
                return path
            named = ((f"{path}.{key}" if path else key, item) for key, item in value.items())
        case list():
            named = ((f"{path}[{index}]", item) for index, item in enumerate(value))
        case _:
            return None
    return next((found for where, item in named if (found := _lone_surrogate(item, where)) is not None), None)


def _plain(message: str) -> str:
    """Replace msgspec's type names with those of JSON, and begin in lower case."""
    message = _TYPE_LIST.sub(
        lambda match: either(_TYPE_NAMES.get(name, name) for name in match[1].split(" | ")), _clip(message)
    )
    return message[:1].lower() + message[1:]


def _clip(text: str, size: int = 2 * MAX_SHOWN_CHARS) -> str:
    return text if len(text) <= size else f"{text[:size]}…"
