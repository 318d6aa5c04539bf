"""The engine process's loop: an idle engine returns memory once nothing has come for a while."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pagoda.assembly import engine_process
from pagoda.assembly.engine_process import RETURN_MEMORY_AFTER_MS, EngineServer
from pagoda.base.errors import ConfigError, RequestError
from pagoda.core.request import LoraRef
from pagoda.engine import wire
from pagoda.engine.engine_core import EngineCore
from tests.engine.clients.engine_calls import call, reply
from tests.fake_engine import fake_core


def encoded(call_id: int, name: str, *arguments: object) -> bytes:
    return wire.Codec(wire.FromEngine).encode(call(call_id, name, *arguments))


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
        return encoded(0, "abort", ())


@pytest.mark.parametrize(("waits_ms", "most"), [([0, 1, 2], 0), ([RETURN_MEMORY_AFTER_MS + 1, 0], 1)])
def test_memory_is_returned_after_a_while_without_work(
    monkeypatch: pytest.MonkeyPatch, waits_ms: list[int], most: int
) -> None:
    returned: list[None] = []
    monkeypatch.setattr(engine_process, "return_freed_memory", lambda: returned.append(None))
    core: EngineCore = fake_core()
    socket: Any = Silence(waits_ms)
    with pytest.raises(Ended):
        EngineServer(core, socket).run()
    assert len(returned) == most


@pytest.mark.parametrize("error", [None, RequestError("no such file"), ConfigError("bad file"), KeyError("a bug")])
def test_an_adapter_that_is_being_read_delays_no_other_message(error: Exception | None) -> None:
    """Nor does the engine count as having work meanwhile, or end with an adapter that cannot be used."""
    loading: Future[None] = Future()
    core: Any = fake_core()
    core.begin_load_adapter = lambda lora: loading
    core.end_load_adapter = lambda lora, loaded: loaded.result()
    sent = list[object]()
    messages = [encoded(1, "load_adapter", LoraRef("a", "/a", "a")), encoded(2, "reset_prefix_cache")]

    class Socket:
        def send(self, data: bytes) -> None:
            sent.append(wire.Codec(wire.FromEngine).decode(data))

        def poll(self, timeout_ms: int) -> bool:
            if not messages and not loading.done():
                loading.set_exception(error) if error is not None else loading.set_result(None)
            return bool(messages)

        def recv(self, flags: int = 0) -> bytes:
            if not messages:
                raise engine_process.zmq.Again if flags else Ended
            return messages.pop(0)

    socket: Any = Socket()
    with pytest.raises(Ended):
        EngineServer(core, socket).run()
    why = f"the adapter 'a' could not be loaded: KeyError: {error}" if isinstance(error, KeyError) else str(error)
    reset, idle, loaded = sent[-3:]
    assert reset == wire.Reply(2, msgspec.Raw(b"\xc3"))  # True
    assert isinstance(idle, wire.IdleReport)
    assert idle.num_handled == 2
    assert loaded == reply(1, why if error is not None else None)


def test_a_call_that_fails_for_no_fault_of_its_caller_ends_the_engine() -> None:
    """The parent starts another one, with the requests."""
    core: Any = fake_core()
    core.abort = lambda keys: {}[tuple(keys[0])]
    messages = [encoded(0, "abort", ((0, 1),))]
    socket: Any = SimpleNamespace(send=lambda _: None, poll=lambda _: True, recv=lambda *_: messages.pop())
    with pytest.raises(KeyError):
        EngineServer(core, socket).run()
