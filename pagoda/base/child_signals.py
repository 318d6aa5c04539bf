"""Signals that must not reach child processes: a terminal sends Ctrl-C to the whole foreground process group."""

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Generator[None, None, None]:
    """Block signals on this thread, so that processes started within never receive them.

    A child inherits the mask. Ignoring the signals in the child's own code would come too late: until then, during its
    imports, an interrupt would end it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
