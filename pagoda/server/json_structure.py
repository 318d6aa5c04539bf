"""Count the values, objects, escapes and slow numbers in a JSON text without decoding it.

Decoding holds the GIL from beginning to end. Long strings and long lists of numbers decode quickly; millions of small
objects do not, and take fifty times their size in memory; a character written as an escape takes ten to thirty times as
long as a plain one. numpy counts them without holding the GIL.
"""

import asyncio

import numpy as np

from pagoda.base.request_limits import RequestLimits

_ALWAYS_QUICK_BYTES = 128 * 1024
_QUICK_NUMBERS_BYTES = 8 * 1024  # no more than 1,500 of the slowest numbers: 15 ms


async def check_structure(data: bytes, limits: RequestLimits) -> None:
    """Raise RequestError if `data` contains more values than `limits` allow. Does not reject invalid JSON."""
    if len(data) > _ALWAYS_QUICK_BYTES:
        await asyncio.to_thread(_check_long, data, limits)
    elif len(data) > _QUICK_NUMBERS_BYTES:
        limits.check("body_exponents", count_large_exponents(data), None)


def _check_long(data: bytes, limits: RequestLimits) -> None:
    limits.check("body_exponents", count_large_exponents(data), None)
    limits.check("body_escapes", int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\\"))), None)
    if _quick_bound(data) > limits.body_objects:
        num_values, num_objects = count_structure(data)
        limits.check("body_values", num_values, None)
        limits.check("body_objects", num_objects, None)


def _quick_bound(data: bytes) -> int:
    """Return an upper bound of the values, objects, lists and keys: it also counts characters inside strings."""
    text = np.frombuffer(data, np.uint8)
    return 1 + sum(int(np.count_nonzero(text == ord(mark))) for mark in ",[{:")


def count_structure(data: bytes) -> tuple[int, int]:
    """Return (values, objects and lists and keys of objects) of a JSON text."""
    text = np.frombuffer(data, np.uint8)
    outside = _outside_strings(data)

    def count(mark: str) -> int:
        return int(np.count_nonzero((text == ord(mark)) & outside))

    num_objects = count("[") + count("{")
    return num_objects + count(",") + 1, num_objects + count(":")


def count_large_exponents(data: bytes) -> int:
    """Return how many numbers of a JSON text have an exponent of three digits or more.

    Beyond what a double's fast conversions cover ("1e300", "1e-310") a number takes 10 us to decode, 300 times as long
    as others of its length.
    """
    text = np.frombuffer(data + bytes(5), np.uint8)  # so that every letter has five successors
    after = np.flatnonzero((text | 0x20) == ord("e")) + 1
    after += (text[after] == ord("+")) | (text[after] == ord("-"))
    for digit in range(3):
        after = after[(text[after + digit] - np.uint8(ord("0"))) < 10]
    return int(np.count_nonzero(_outside_strings(data)[after])) if len(after) else 0


def _outside_strings(data: bytes) -> np.ndarray:
    """Return which characters of a JSON text are outside of strings: bool [n]."""
    text = np.frombuffer(data, np.uint8)
    quotes = text == ord('"')
    if b"\\" in data:
        quotes &= ~_escaped(text == ord("\\"))
    return np.bitwise_and(np.cumsum(quotes, dtype=np.uint8), 1) == 0  # overflow modulo 256 preserves parity


def _escaped(backslashes: np.ndarray) -> np.ndarray:
    """Return which characters follow a run of backslashes of odd length: bool [n]."""
    index = np.arange(len(backslashes), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(backslashes, np.int32(-1), index))
    escaped = np.zeros(len(backslashes), bool)
    escaped[1:] = (index - last_other)[:-1] % 2 == 1
    return escaped
