"""How a process keeps memory: what glibc does with freed buffers, and what Python's garbage collector looks at."""

import contextlib
import ctypes
import gc
from collections.abc import Generator, Mapping

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 128 * 1024
_NUM_ARENAS = 4


def return_freed_memory() -> None:
    """Return freed memory to the system now, as far as whole pages of it are free. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_buffers_apart(environment: Mapping[str, str]) -> None:
    """Give every large buffer pages of its own, which return to the system when it is freed.

    Meant for servers, at their start. By default, glibc takes buffers of up to 32 MiB from its heaps once one of that
    size has been freed, and has a heap for each of many threads. Small objects that live long then end up between
    buffers that do not, and after some thousand large requests two thirds of the heaps were free and none of it could
    be returned. Settings of glibc's own in the environment take precedence. Does nothing without glibc.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # setting it also turns off its growth
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)


@contextlib.contextmanager
def collecting_nothing() -> Generator[None]:
    """Turn the garbage collector off while a process imports and loads what it keeps until its end.

    Traversing these objects again and again takes a tenth of the time until the first token, or until a server is up.
    Afterwards they are frozen: the collector skips them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


def keep_objects() -> None:
    """Let the garbage collector look no more at the objects that exist now. Meant for a server that has started.

    They are 100,000 and more, most of them libraries' own, and will not be freed; full collections stopped all threads
    for 50 to 100 ms each to find that out.
    """
    gc.collect()
    gc.freeze()
