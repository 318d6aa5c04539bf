"""The child's side of a KillableProcess: answers messages that arrive over a socket, its standard input.

The parent kills a child that does not answer in time. If the parent cannot, an alarm does so shortly afterwards, and a
thread ends the child with its parent. Imports are few, so that a killed child is replaced in about a tenth of a second.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

FIRST = struct.Struct("<Q")  # size of what the child gets for its start
READY = b"R"  # sent when the child has started
REQUEST = struct.Struct("<dQ")  # timeout in seconds, size of the message
REPLY = struct.Struct("<?Q")  # whether the child ends after it, size of the reply

_KILL_AFTER_S = 1.0  # after the deadline, in case the parent does not kill this process
_PARENT_CHECK_S = 0.5


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes. Raises EOFError if the other end closes the connection first."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError("the other end has closed the connection")
        at += count
    view.release()
    return bytes(data)


class Parent:
    """The process that started this one. Create it once, first."""

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills the process, even inside a long C call
        self._connection = socket.socket(fileno=os.dup(0))
        threading.Thread(target=_exit_with, args=(int(sys.argv[-1]),), daemon=True).start()

    def first(self) -> bytes:
        """Return what the parent sends for the start. To be called once."""
        (size,) = FIRST.unpack(receive_exactly(self._connection, FIRST.size))
        return receive_exactly(self._connection, size)

    def serve(self, answer: Callable[[bytes], bytes], is_spent: Callable[[], bool] = lambda: False) -> None:
        """Answer messages until the parent is gone, or until `is_spent` returns True after an answer."""
        connection = self._connection
        with contextlib.suppress(EOFError, ConnectionError):
            connection.sendall(READY)
            while True:
                timeout_s, size = REQUEST.unpack(receive_exactly(connection, REQUEST.size))
                signal.setitimer(signal.ITIMER_REAL, timeout_s + _KILL_AFTER_S)
                reply = answer(receive_exactly(connection, size))
                signal.setitimer(signal.ITIMER_REAL, 0)
                is_last = is_spent()
                connection.sendall(REPLY.pack(is_last, len(reply)) + reply)
                if is_last:
                    return


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space to what this process uses now plus `memory_bytes`, where the system can do that."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + memory_bytes, present + memory_bytes))


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
