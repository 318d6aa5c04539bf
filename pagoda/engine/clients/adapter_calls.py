"""AdapterCalls: load and unload adapters by messages to an engine process, and load them again into the next one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pagoda.base.errors import RequestError, WorkerDied
from pagoda.core.request import LoraRef
from pagoda.engine import wire

_MAX_DEATHS = 2


@dataclass(slots=True)
class _Load:
    """done: resolved when the adapter is loaded.   num_deaths: engines that died before they replied."""

    lora: LoraRef
    done: "asyncio.Future[None]"
    num_deaths: int = 0


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
        self._loads: dict[int, _Load] = {}  # by call id
        self._reloads: dict[int, LoraRef] = {}
        self._waiting: list[_Load] = []  # for an engine
        self._loaded: dict[str, LoraRef] = {}  # by digest
        self._is_up = False

    async def load(self, lora: LoraRef) -> None:
        """Load an adapter; wait for an engine if there is none.

        Raises RequestError if it cannot be used, WorkerDied if two engines die meanwhile or none can be started.
        """
        load = _Load(lora, asyncio.get_running_loop().create_future())
        if self._is_up:
            self._send_load(load)
        else:
            self._waiting.append(load)
        await load.done

    def unload(self, lora: LoraRef) -> None:
        self._loaded.pop(lora.digest, None)
        self._send(wire.UnloadAdapter(lora))

    def begin(self) -> None:
        """An engine has become ready: load what the last one had, and what has waited for it."""
        self._is_up = True
        for lora in self._loaded.values():
            self._reloads[self._call(lora)] = lora
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            self._send_load(load)

    def end(self) -> None:
        """The engine has died."""
        self._is_up = False
        loads, self._loads = self._loads, {}
        reloads, self._reloads = self._reloads, {}
        for lora in reloads.values():
            self._loaded.pop(lora.digest, None)
        for load in loads.values():
            load.num_deaths += 1
            if load.num_deaths < _MAX_DEATHS:
                self._waiting.append(load)
            elif not load.done.done():  # the caller may have been cancelled
                load.done.set_exception(WorkerDied(f"engines died while they loaded the adapter {load.lora.name!r}"))

    def give_up(self, error: WorkerDied) -> None:
        """There will be no engine any more."""
        self.end()
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            if not load.done.done():
                load.done.set_exception(error)

    def on_reply(self, reply: wire.AdapterReply) -> None:
        load = self._loads.pop(reply.call_id, None)
        lora = load.lora if load is not None else self._reloads.pop(reply.call_id)
        if reply.error is None:
            self._loaded[lora.digest] = lora
        else:
            self._loaded.pop(lora.digest, None)
        if load is None or load.done.done():
            return
        if reply.error is None:
            load.done.set_result(None)
        else:
            load.done.set_exception(RequestError(reply.error, "lora_request"))

    def _send_load(self, load: _Load) -> None:
        self._loads[self._call(load.lora)] = load

    def _call(self, lora: LoraRef) -> int:
        self._next_call += 1
        self._send(wire.LoadAdapter(self._next_call, lora))
        return self._next_call
