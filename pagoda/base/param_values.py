"""Read the values of request parameters: each function returns a value of one type, or raises a RequestError.

`name` is the parameter's, for the message, which also says what is allowed.
"""

import ctypes
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pagoda.base.errors import RequestError
from pagoda.base.registry import nearest
from pagoda.base.text import check_encodable

T = TypeVar("T")
Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)

if TYPE_CHECKING:

    class Converted(Generic[Given, Kept]):
        """The type of a field that takes one type and keeps another. It is the second one when the program runs."""

        def __get__(self, instance: object, owner: object = None) -> Kept: ...
        def __set__(self, instance: object, value: Given) -> None: ...
else:

    class Converted:
        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[1]


Reader = Callable[[str, Any], Any]
"""Name and value of a parameter -> the value to store. Raises RequestError."""

MAX_COUNT = 2**31 - 1
"""Counts are stored in int32 columns."""


def refuse(name: str, value: object, allowed: str) -> RequestError:
    """Return the error for a parameter whose value is not allowed."""
    return RequestError(f"{name}={repr(value)[:80]} is not allowed: it must be {allowed}", name)


def read_integer(name: str, value: Any, low: int, high: int = MAX_COUNT) -> int:
    """Return an integer of any integral type, bool excepted. Raises RequestError unless low <= value <= high."""
    allowed = f"an integer of at least {low}" if high >= MAX_COUNT else f"an integer in [{low}, {high}]"
    if isinstance(value, bool):
        raise refuse(name, value, allowed)
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(name, value, allowed) from None
    if not low <= number <= high:
        raise refuse(name, value, f"an integer in [{low}, {high}]" if number > high else allowed)
    return number


def read_optional_integer(name: str, value: Any, low: int, high: int = MAX_COUNT) -> int | None:
    """As `read_integer`; None stays None."""
    return None if value is None else read_integer(name, value, low, high)


def read_number(name: str, value: Any, *, low: float, high: float = math.inf, low_open: bool = False) -> float:
    """Return a finite float between low and high; `low_open` excludes low itself. It must be so as float32, too."""
    if high == math.inf:
        allowed = f"a finite number {'above' if low_open else 'of at least'} {low:g}, as float32 too"
    else:
        allowed = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool | str | bytes):
        raise refuse(name, value, allowed)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise refuse(name, value, allowed) from None
    kept = ctypes.c_float(number).value  # too large a number becomes inf, one too close to zero becomes it
    if not math.isfinite(kept) or number > high or number < low or (low_open and kept == low):
        raise refuse(name, value, allowed)
    return number


def read_strings(name: str, value: Any) -> tuple[str, ...]:
    """Return one string or several, none of them empty; none for None. Raises RequestError."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, bytes | Mapping) or not isinstance(items, Iterable):
        raise refuse(name, value, "a string or a list of strings")
    texts = tuple(items)
    if not all(isinstance(text, str) and text for text in texts):
        raise refuse(name, value, "a string or a list of strings, none of them empty")
    for text in texts:
        check_encodable(name, text)
    return texts


def read_token_ids(name: str, value: Any, *, allow_empty: bool = True) -> tuple[int, ...]:
    """Return a list of token ids as a tuple; empty for None. Raises RequestError."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refuse(name, value, "a list of token ids")
    ids = tuple(value)
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_COUNT:  # checked at the speed of C
        ids = tuple(read_integer(name, item, 0) for item in ids)
    if not ids and not allow_empty:
        raise refuse(name, value, "a list of at least one token id, or None")
    return ids


def read_flag(name: str, value: Any) -> bool:
    """Return True or False. Raises RequestError for anything else."""
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False")
    return value


def read_optional_flag(name: str, value: Any) -> bool | None:
    """As `read_flag`; None stays None."""
    if value is not None and not isinstance(value, bool):
        raise refuse(name, value, "True, False or None")
    return value


# ---- classes of parameters


def checked(
    readers: Mapping[str, Reader], unserved: Mapping[str, tuple[tuple[Any, ...], str]] | None = None
) -> Callable[[type[T]], type[T]]:
    """Return a decorator of dataclasses whose fields are read when they are set, at construction and later.

    readers: by field.   unserved: parameters of vLLM that are accepted with a neutral value -> those, and what to do
    otherwise. An unknown name raises an error that suggests the closest one.
    """
    unserved = unserved or {}

    def decorate(kind: type[T]) -> type[T]:
        fields = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
        construct = kind.__init__

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for name in given.keys() - set(fields):
                neutral, remedy = unserved.get(name, ((), ""))
                if not remedy:
                    raise TypeError(f"{kind.__name__} has no parameter {name!r:.80}{nearest(name, fields)}")
                if given.pop(name) not in neutral:
                    raise RequestError(f"{name} of vLLM is not supported: {remedy}", name)
            construct(self, *args, **given)

        def set_checked(self: Any, name: str, value: Any) -> None:
            reader = readers.get(name)
            if reader is None and name not in fields:
                raise AttributeError(f"{kind.__name__} has no parameter {name!r:.80}{nearest(name, fields)}")
            object.__setattr__(self, name, value if reader is None else reader(name, value))

        def copied(self: Any) -> Any:
            new = object.__new__(type(self))
            for name in fields:
                object.__setattr__(new, name, getattr(self, name))
            return new

        kind.__init__ = init
        kind.__setattr__ = set_checked  # type: ignore[method-assign,assignment]
        kind.__copy__ = copied  # type: ignore[attr-defined]
        return kind

    return decorate
