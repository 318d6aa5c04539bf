"""How much structure a JSON text has, counted without decoding it.

Decoding holds the interpreter lock from beginning to end. Long strings and long lists of numbers are decoded quickly;
millions of small objects are not, and take fifty times their size in memory. numpy counts them without the lock.
"""

import asyncio

import numpy as np

from pagoda.base.request_limits import RequestLimits

_ALWAYS_QUICK_BYTES = 128 * 1024


async def check_structure(data: bytes, limits: RequestLimits) -> None:
    """Raise RequestError if `data` holds more values than `limits` allow. Text that is not JSON passes."""
    if len(data) <= _ALWAYS_QUICK_BYTES or _quick_bound(data) <= limits.body_objects:
        return
    num_values, num_objects = await asyncio.to_thread(count_structure, data)
    limits.check("body_values", num_values, None)
    limits.check("body_objects", num_objects, None)


def _quick_bound(data: bytes) -> int:
    """At least as many as there are values, objects, lists and keys: the characters in strings count as well."""
    text = np.frombuffer(data, np.uint8)
    return 1 + sum(int(np.count_nonzero(text == ord(mark))) for mark in ",[{:")


def count_structure(data: bytes) -> tuple[int, int]:
    """Return (values, objects and lists and keys of objects) of a JSON text."""
    text = np.frombuffer(data, np.uint8)
    quotes = text == ord('"')
    if b"\\" in data:
        quotes &= ~_escaped(text == ord("\\"))
    outside = np.bitwise_and(np.cumsum(quotes, dtype=np.uint8), 1) == 0  # modulo 256 keeps what is even

    def count(mark: str) -> int:
        return int(np.count_nonzero((text == ord(mark)) & outside))

    num_objects = count("[") + count("{")
    return num_objects + count(",") + 1, num_objects + count(":")


def _escaped(backslashes: np.ndarray) -> np.ndarray:
    """bool [n]: the characters after a run of backslashes of odd length."""
    index = np.arange(len(backslashes), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(backslashes, np.int32(-1), index))
    escaped = np.zeros(len(backslashes), bool)
    escaped[1:] = (index - last_other)[:-1] % 2 == 1
    return escaped
