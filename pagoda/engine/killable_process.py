"""KillableProcess: run work that may never end, or need any amount of memory, in a child process that can be killed.

The child's side is killable_worker.py. Neither side shares memory with the other: messages are bytes, over a socket.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

from pagoda.base.child_signals import signals_blocked
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.killable_worker import FIRST, READY, REPLY, REQUEST, receive_exactly

_START_S = 30.0  # for starting a child: imports can be slow on a busy machine, and do not count for the work

Message = Callable[[bool], bytes]
"""Makes a message. The argument says whether it is the first that the child gets; the call may raise."""


class KillableProcess:
    """A child, `python -m MODULE ARGUMENTS... PARENT_PID`, started on first use and again after it has ended.

    Thread-safe; one exchange at a time.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        first: Callable[[], bytes] | None = None,
        has_stderr: bool = True,
    ) -> None:
        """first: makes what each new child gets before any message, for its start (Parent.first).

        has_stderr: the child writes to this process's standard error, instead of nowhere.
        """
        self._command = [sys.executable, "-m", module, *map(str, arguments)]
        self._first = first
        self._stderr = None if has_stderr else subprocess.DEVNULL
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_closing = False

    def exchange(self, message: Message, timeout_s: float, cancellation: Cancellation | None = None) -> bytes:
        """Send a message and return the reply. A child that ends meanwhile is replaced, and the message sent again.

        timeout_s: for the work; starting a child does not count.   cancellation: kills the child at work.
        Raises TimeoutError after killing a child that took longer, EOFError if two children ended, Cancelled.
        """
        cancellation = cancellation if cancellation is not None else Cancellation()
        with self._lock, cancellation.stopped_by(self.kill):
            try:
                return self._exchange(message, timeout_s, cancellation)
            except (EOFError, ConnectionError):
                if self._is_closing:
                    raise EOFError("the process was closed") from None
                # Something else may have killed the child, before or after it got the message.
                try:
                    return self._exchange(message, timeout_s, cancellation)
                except ConnectionError as error:
                    raise EOFError(str(error)) from None

    def start(self) -> None:
        """Start the child now, so that the first message does not wait for it."""
        with self._lock:
            self._running()

    def kill(self) -> None:
        """Kill the child, even at work; its message is then sent to another one. Thread-safe."""
        child = self._child
        if child is not None:
            child.process.kill()

    def close(self) -> None:
        """End the child; an exchange in progress raises EOFError. Idempotent; another message starts a new child."""
        self._is_closing = True
        self.kill()
        with self._lock:
            self._is_closing = False
            self._end()

    @property
    def pid(self) -> int | None:
        """The running child's process id."""
        child = self._child
        return child.process.pid if child is not None else None

    # ---- with the lock held

    def _exchange(self, message: Message, timeout_s: float, cancellation: Cancellation) -> bytes:
        cancellation.check()
        child = self._running()
        cancellation.check()  # from here on, `kill` ends the child that gets the message
        data = message(child.is_new)
        try:
            reply = child.exchange(data, timeout_s)
        except BaseException:  # KeyboardInterrupt, say: the next message must not get the reply to this one
            self._end()
            raise
        if child.has_ended:
            self._end()
        return reply

    def _running(self) -> "_Child":
        if self._child is not None and not self._child.is_usable():
            self._end()
        if self._child is None:
            first = self._first() if self._first is not None else None
            self._child = _Child(self._command, first, self._stderr)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A running child.   is_new: it has not got a message yet.   has_ended: it exits after its last reply."""

    def __init__(self, command: list[str], first: bytes | None, stderr: int | None) -> None:
        self._connection, theirs = socket.socketpair()
        self._owner = os.getpid()
        with theirs, signals_blocked(signal.SIGINT):  # Ctrl-C is for the parent
            self.process = subprocess.Popen(
                [*command, str(self._owner)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=stderr
            )
        self._finalizer = weakref.finalize(self, _kill, self.process, self._connection, self._owner)
        self._first = first
        self.is_new = True
        self.has_ended = False

    def is_usable(self) -> bool:
        """Return False if the process has exited, or if this is a fork of the process that started it."""
        return os.getpid() == self._owner and self.process.poll() is None

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Raises TimeoutError, EOFError or ConnectionError if the child is no longer usable."""
        if self.is_new:
            until_s = time.monotonic() + _START_S
            if self._first is not None:
                self._send(FIRST.pack(len(self._first)) + self._first, until_s)
                self._first = None
            self._receive(len(READY), until_s)
            self.is_new = False
        until_s = time.monotonic() + timeout_s
        self._send(REQUEST.pack(timeout_s, len(data)) + data, until_s)
        self.has_ended, size = REPLY.unpack(self._receive(REPLY.size, until_s))
        return self._receive(size, until_s)

    def _send(self, data: bytes, until_s: float) -> None:
        self._connection.settimeout(max(0.001, until_s - time.monotonic()))
        self._connection.sendall(data)

    def _receive(self, size: int, until_s: float) -> bytes:
        self._connection.settimeout(max(0.001, until_s - time.monotonic()))
        return receive_exactly(self._connection, size)

    def end(self) -> None:
        self._finalizer()


def _kill(process: "subprocess.Popen[bytes]", connection: socket.socket, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
