"""An event loop whose clock moves only while nothing else can happen: the client and the server of a test share it.

A timeout then fires at its own time, however busy the machine is, and a test that waits for one takes no time.
"""

import asyncio
import selectors
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE_S = 0.002  # real time in which bytes that were sent on the loopback interface arrive, unless it is busy


class _SkippingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Waits for input; if there is none, it advances the clock by the time that the loop wanted to wait."""

    now_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._sender = socket.create_connection(listener.getsockname())
            self._receiver, _ = listener.accept()
        self._sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(_GRACE_S)
        if not events:
            # Packets of the loopback interface wait in a queue until the kernel has time for them: once a byte that is
            # sent now has arrived, so have those that were sent before.
            self._sender.send(b"x")
            self._receiver.recv(1)
            events = super().select(0)
        if not events:
            self.now_s += timeout
        return events

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
        super().close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Seconds since the loop was made, of virtual time."""

    def __init__(self) -> None:
        self._clock = _SkippingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run; `asyncio.sleep` and timeouts take no real time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
