"""ApiGroup: several processes that serve HTTP on one port, before the engine of this process.

Each has a socket of its own on the port, which this process keeps open: while one is dead, the others accept what
connects to its socket. A process that dies takes only its own connections along; the engine aborts their requests.
"""

import asyncio
import logging
import math
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from pagoda.base.config import EngineConfig
from pagoda.base.errors import WorkerDied
from pagoda.engine.clients.client_server import ClientServer
from pagoda.engine.clients.engine_link import WATCH_INTERVAL_S
from pagoda.engine.clients.replicas import EngineOwner, own_engines
from pagoda.engine.clients.supervisor import STABLE_S, Restarts
from pagoda.engine.wire import EngineSizes
from pagoda.metrics.observed_requests import RequestRecord, oldest_of
from pagoda.process.child_process import RendezvousDir, cpu_s_of, end_child, start_child
from pagoda.process.out_of_memory import describe_exit
from pagoda.process.watchdog import Watchdog
from pagoda.server.api_start import LASTING_ERRORS, SOCKET, ApiStart, take_error
from pagoda.server.listening import announce, check_free, listen_together, lock_port
from pagoda.server.load_report import report_load
from pagoda.server.peers import CALL_S, LOAD_S
from pagoda.server.served_adapters import AdapterChange
from pagoda.server.shared import Shared

logger = logging.getLogger("pagoda.server")

_MODULE = "pagoda.server.api_process"
_END_S = 10.0
"""How long processes may take to end after the drain's deadline, before they are killed."""
_LOOK_S = 1.0
"""So often each process is asked whether it answers."""
_START_S = LOAD_S
"""A process that does nothing for so long before it serves is killed; one that computes, after ten times as long."""


@dataclass(slots=True, eq=False)
class _Slot:
    """A process that serves HTTP, and those that replace it.

    has_served: one of them did.   ready_at_s: since when the present one serves.   client: its index.
    has_worked: it has had a request.
    answers: whether it did so when it was asked last.   num_answers: how often it did, or one before.
    """

    number: int
    listener: socket.socket
    process: "subprocess.Popen[bytes] | None" = None
    has_served: bool = False
    ready_at_s: float | None = None
    client: int | None = None
    has_worked: bool = False
    answers: bool = True
    num_answers: int = 0

    @property
    def serves(self) -> bool:
        return self.client is not None and self.ready_at_s is not None


async def serve_together(config: EngineConfig) -> None:
    """Serve with `api_server_count` processes until a signal; return when all have ended.

    Raises ConfigError for wrong settings, WorkerDied if an engine or a process cannot be started any more.
    """
    listeners = listen_together(config.server)
    engine = own_engines(config)
    starting = asyncio.create_task(engine.start())
    place = RendezvousDir()
    try:
        with lock_port(config.server, listeners[0]):
            await ApiGroup(config, engine, listeners, place).run(starting)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.shutdown()
        for listener in listeners:
            listener.close()
        place.remove()


class ApiGroup:
    """The processes, and what they share."""

    def __init__(
        self, config: EngineConfig, engine: EngineOwner, listeners: list[socket.socket], place: RendezvousDir
    ) -> None:
        self._config, self._engine, self._place = config, engine, place
        self._slots = [_Slot(number, listener) for number, listener in enumerate(listeners, 1)]
        self._has_begun = self._is_serving = self._is_draining = False
        self._oldest: RequestRecord | None = None
        self._salt_secret = secrets.token_bytes(16)
        self._shared = Shared(config.server, lambda: all(slot.serves for slot in self._slots))
        self._drained: set[int] = set()
        self._all_drained = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, starting: "asyncio.Task[EngineSizes]") -> None:
        """Keep the processes running until a signal, then wait until they have ended. Raises what ends them all.

        starting: starts the engine.
        """
        services = {
            "begin": self._begin,
            "ready": self._on_ready,
            "drained": self._on_drained,
            **self._shared.services,
        }
        self._server = self._shared.server = ClientServer(self._engine, starting, services, self._on_left)
        await self._server.start(str(self._place.path(SOCKET)))
        pass_on = self._engine.on_step

        def on_step(num_tokens: int) -> None:
            self._shared.tokens_per_step.observe(num_tokens)
            pass_on(num_tokens)

        self._engine.on_step = on_step
        keepers = {asyncio.create_task(self._keep(slot)) for slot in self._slots}
        waited: set[asyncio.Task[Any]] = {starting, *keepers}
        failure: BaseException | None = None
        try:
            while not keepers.isdisjoint(waited):
                done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                failure = failure or next((error for task in done if (error := task.exception())), None)
                if starting in done and failure is None:
                    waited.add(asyncio.create_task(self._engine.wait_until_gone()))
                elif failure is not None and not self._is_serving:
                    raise failure
                elif not self._is_draining:  # one has failed for good, or the engine has
                    self.drain()
        finally:
            for task in (*keepers, *waited, *self._tasks):
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            for slot in self._slots:
                self._end(slot)
            await self._server.close()
            self._shared.close()
        if (error := self._engine.died or failure) is not None:
            raise error

    # ---- each process

    async def _keep(self, slot: _Slot) -> None:
        """Run one process after another. Raises ConfigError for wrong settings, WorkerDied if too many are useless."""
        restarts = Restarts()
        while not self._is_draining:
            slot.ready_at_s, slot.has_worked = None, False
            try:
                how = describe_exit(await self._run_one(slot))
            except OSError as error:
                how = f"could not be started: {error}"
            if self._is_draining:
                return
            if (known := take_error(self._place, slot.number)) is not None:
                how += f": {known}"
                if isinstance(known, LASTING_ERRORS) and not slot.has_served:
                    raise known
            is_ready = slot.ready_at_s is not None
            is_stable = slot.ready_at_s is not None and time.monotonic() - slot.ready_at_s >= STABLE_S
            pause_s = restarts.pause_s(not (is_stable or (is_ready and slot.has_worked)), slot.has_served)
            if pause_s is None:
                times = restarts.num_fruitless
                raise WorkerDied(f"API process {slot.number} {how}, {times} times in a row before it was of any use")
            logger.error(
                "API process %d %s; starting another%s", slot.number, how, f" in {pause_s:.1f} s" * bool(pause_s)
            )
            await asyncio.sleep(pause_s)

    async def _run_one(self, slot: _Slot) -> int:
        """Start a process; return its exit code when it has ended. Raises OSError if none can be started."""
        fds, config = [one.listener.fileno() for one in self._slots], self._config
        if (source := self._engine.source) is not None:
            config = source.of(config)  # the files of before may be gone
        if slot.number > 1:  # the first one writes the trace, if one is written
            server = replace(config.server, logs=replace(config.server.logs, trace=None))
            config = replace(config, server=server)
        start = ApiStart(config, slot.number, not slot.has_served, self._place.folder, fds, self._salt_secret)
        process = slot.process = start_child(_MODULE, [], msgspec.msgpack.encode(start, enc_hook=str), fds)
        starting, serving = Watchdog(time.monotonic()), Watchdog(time.monotonic())
        timeout_s = (self._config.server.server_timeouts.step_timeout_s or math.inf) + _LOOK_S + CALL_S
        while process.poll() is None:
            cpu_s, now_s = cpu_s_of(process.pid), time.monotonic()
            is_starting = not slot.serves and self._engine.is_up  # before the engine is, it waits for that
            if starting.is_hung(True, is_starting, cpu_s, max(_START_S, timeout_s), now_s) or serving.is_hung(
                slot.num_answers, slot.serves, cpu_s, timeout_s, now_s
            ):
                silent_s = now_s - min(starting.progress_at_s, serving.progress_at_s)
                logger.error("API process %d has not answered for %.1f s: it is killed", slot.number, silent_s)
                break
            await asyncio.sleep(WATCH_INTERVAL_S)
        code = end_child(process)
        while slot.client is not None:  # until the end of its connection was seen, too
            await asyncio.sleep(WATCH_INTERVAL_S)
        return code

    async def _look(self) -> None:
        """Find out again and again which processes answer, and which request runs for longest."""
        while True:
            asked = [slot.client for slot in self._slots]
            answers = await self._server.ask("oldest", timeout_s=CALL_S, returns=RequestRecord | None)
            self._oldest = oldest_of(answers.values())
            before = [slot.answers for slot in self._slots]
            for slot, client in zip(self._slots, asked, strict=True):
                slot.answers = slot.client != client or client in answers
                slot.num_answers += slot.answers
            if before != [slot.answers for slot in self._slots]:
                self._spread_connections()
            await asyncio.sleep(_LOOK_S)

    def _end(self, slot: _Slot) -> None:
        if slot.process is not None:
            end_child(slot.process)

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- what the processes call

    async def _begin(self, client: int, number: int) -> list[AdapterChange]:
        """A process is about to listen. Return what loads the adapters, if it is not the first of its number.

        Raises ConfigError if another server has taken the port meanwhile.
        """
        slot = self._slots[number - 1]
        if not self._has_begun:
            check_free(self._config.server, slot.listener)
            self._has_begun = True
            for signal_number in (signal.SIGTERM, signal.SIGINT):  # from now on, there may be requests
                asyncio.get_running_loop().add_signal_handler(signal_number, self._on_signal)
        slot.client = client
        return await self._shared.read_changes() if slot.has_served else []

    def _on_ready(self, client: int, number: int) -> None:
        slot = self._slots[number - 1]
        slot.ready_at_s, slot.has_served = time.monotonic(), True
        self._spread_connections()
        if not self._is_serving and all(slot.ready_at_s is not None for slot in self._slots):
            self._is_serving = True
            announce(self._config.server, self._slots[0].listener)
            self._run(self._look())
            name = self._config.model.names[0]
            self._run(report_load(name, self._engine.stats, self._shared.read_counts, lambda: self._oldest))

    async def _on_drained(self, client: int) -> None:
        """Return when all processes have no request any more."""
        self._drained.add(client)
        self._look_whether_drained()
        if self._is_draining:  # else, it ends alone
            await self._all_drained.wait()

    def _on_left(self, client: int) -> None:
        for slot in self._slots:
            if slot.client == client:
                slot.client = None
                slot.has_worked = self._shared.has_admitted(client)
        self._shared.on_left(client)
        self._spread_connections()
        self._look_whether_drained()

    def _spread_connections(self) -> None:
        """Have those that serve accept what connects to the sockets of those that do not, until these do again."""
        if self._is_serving and len({slot.listener for slot in self._slots}) > 1:
            orphaned = [slot.number for slot in self._slots if not (slot.serves and slot.answers)]
            self._run(self._server.ask("accept_for", orphaned, timeout_s=CALL_S))

    def _look_whether_drained(self) -> None:
        clients = {slot.client for slot in self._slots if slot.client is not None}
        if self._is_draining and clients <= self._drained:
            self._all_drained.set()

    # ---- the end

    def _on_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # the next one ends this process, and so all, at once
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        self.drain()

    def drain(self) -> None:
        """Have all processes finish their requests, and end. Idempotent."""
        if self._is_draining:
            return
        self._is_draining = True
        for slot in self._slots:
            if slot.client is None:
                self._end(slot)
        loop = asyncio.get_running_loop()
        self._run(self._server.ask("drain", timeout_s=CALL_S))
        for slot in self._slots:
            timeout_s = self._config.server.server_timeouts.drain_timeout_s + _END_S
            loop.call_later(timeout_s, partial(self._end, slot))
