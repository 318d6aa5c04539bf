"""The engine process's loop: an idle engine returns memory once nothing has come for a while."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.assembly import engine_process
from pagoda.assembly.engine_process import RETURN_MEMORY_AFTER_MS, EngineServer
from pagoda.engine import wire
from pagoda.engine.engine_core import EngineCore
from tests.fake_engine import fake_core


class Ended(Exception):
    """There are no more messages."""


class Silence:
    """A socket that receives these messages, each after a while; then it raises Ended."""

    def __init__(self, waits_ms: list[int]) -> None:
        self._waits_ms = waits_ms

    def send(self, data: bytes) -> None:
        pass

    def poll(self, timeout_ms: int) -> bool:
        return not self._waits_ms or self._waits_ms[0] <= timeout_ms

    def recv(self, flags: int = 0) -> bytes:
        if flags:
            raise engine_process.zmq.Again
        if not self._waits_ms:
            raise Ended
        self._waits_ms.pop(0)
        return wire.Codec(wire.ToEngine).encode(wire.AbortRequests(()))


@pytest.mark.parametrize(("waits_ms", "most"), [([0, 1, 2], 0), ([RETURN_MEMORY_AFTER_MS + 1, 0], 1)])
def test_memory_is_returned_after_a_while_without_work(
    monkeypatch: pytest.MonkeyPatch, waits_ms: list[int], most: int
) -> None:
    returned: list[None] = []
    monkeypatch.setattr(engine_process, "return_freed_memory", lambda: returned.append(None))
    core: EngineCore = fake_core()
    executor: Any = SimpleNamespace(take_step_tokens=tuple)
    socket: Any = Silence(waits_ms)
    with pytest.raises(Ended):
        EngineServer(core, executor, socket).run()
    assert len(returned) == most
