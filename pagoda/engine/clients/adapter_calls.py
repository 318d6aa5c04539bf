"""AdapterCalls: loads of LoRA adapters that wait for the reply of an engine process."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pagoda.base.errors import RequestError, WorkerDied
from pagoda.core.request import LoraRef
from pagoda.engine import wire

_MAX_DEATHS = 2


@dataclass(slots=True)
class _Load:
    """done: resolved when the adapter is loaded; None if no caller waits for it.

    is_wanted: whether nothing has unloaded the adapter since.   num_deaths: engines that died before they replied.
    """

    lora: LoraRef
    done: "asyncio.Future[None] | None" = None
    is_wanted: bool = True
    num_deaths: int = 0

    def settle(self, error: Exception | None) -> None:
        if self.done is None or self.done.done():  # the caller may have been cancelled
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class AdapterCalls:
    """Loads that wait for their reply, and the adapters that are loaded.

    A load during which an engine dies is tried once more, in the next engine. Adapters that were loaded are loaded into
    the next engine as well, but not again if that dies before it replies: requests carry their adapter, and an engine
    reads one that it does not hold, so that this only saves a request the wait.
    """

    def __init__(self, send: Callable[[wire.ToEngine], None]) -> None:
        """send: does nothing while there is no engine."""
        self._send = send
        self._next_call = 0
        self._loads: dict[int, _Load] = {}  # by call id, sent to the engine
        self._waiting: list[_Load] = []  # for an engine
        self._loaded: dict[str, LoraRef] = {}  # by digest
        self._is_up = False

    async def load(self, lora: LoraRef) -> None:
        """Load an adapter; wait for an engine if there is none.

        Raises RequestError if it cannot be used, WorkerDied if two engines die meanwhile or none can be started.
        """
        done = asyncio.get_running_loop().create_future()
        load = _Load(lora, done)
        if self._is_up:
            self._send_load(load)
        else:
            self._waiting.append(load)
        await done

    def unload(self, lora: LoraRef) -> None:
        """Unload an adapter, also after loads of it that have no reply yet."""
        self._loaded.pop(lora.digest, None)
        for load in (*self._loads.values(), *self._waiting):
            load.is_wanted = load.is_wanted and load.lora.digest != lora.digest
        self._send(wire.UnloadAdapter(lora))

    def begin(self) -> None:
        """An engine is ready for loads: load what the last one had, and what has waited. Idempotent, until `end`."""
        if self._is_up:
            return
        self._is_up = True
        waiting, self._waiting = self._waiting, []
        for load in (*map(_Load, self._loaded.values()), *waiting):
            self._send_load(load)

    def end(self) -> None:
        """The engine has died."""
        self._is_up = False
        loads, self._loads = self._loads, {}
        for load in loads.values():
            load.num_deaths += 1
            if load.done is None:
                self._loaded.pop(load.lora.digest, None)
            elif load.num_deaths < _MAX_DEATHS:
                self._waiting.append(load)
            else:
                load.settle(WorkerDied(f"engines died while they loaded the adapter {load.lora.name!r}"))

    def give_up(self, error: WorkerDied) -> None:
        """There will be no engine any more."""
        self.end()
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            load.settle(error)

    def on_reply(self, reply: wire.AdapterReply) -> None:
        load = self._loads.pop(reply.call_id)
        if reply.error is not None:
            self._loaded.pop(load.lora.digest, None)
            load.settle(RequestError(reply.error, "lora_request"))
            return
        if load.is_wanted:
            self._loaded[load.lora.digest] = load.lora
        load.settle(None)

    def _send_load(self, load: _Load) -> None:
        self._next_call += 1
        self._loads[self._next_call] = load
        self._send(wire.LoadAdapter(self._next_call, load.lora))
        if not load.is_wanted:  # unloaded while there was no engine
            self._send(wire.UnloadAdapter(load.lora))
