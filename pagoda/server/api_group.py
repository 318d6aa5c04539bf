"""ApiGroup: several processes that serve HTTP on one port, before the engine of this process.

Each has a socket of its own on the port, which this process keeps open: what connects to one that has died waits for
the next one. A process that dies takes only its own connections along, and the engine aborts their requests.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, PagodaError, WorkerDied
from pagoda.engine.clients.client_server import ClientServer
from pagoda.engine.clients.engine_link import WATCH_INTERVAL_S
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.clients.supervisor import STABLE_S, Restarts
from pagoda.engine.wire import EngineSizes
from pagoda.metrics.prometheus import Counts, add_counts, tokens_per_step
from pagoda.process.child_process import RendezvousDir, end_child, start_child
from pagoda.process.out_of_memory import describe_exit
from pagoda.server.admission import Admission
from pagoda.server.listening import announce, check_free, listen_together
from pagoda.server.load_report import report_load
from pagoda.server.one_process import Failure, RequestRecord, oldest_of
from pagoda.server.peers import CALL_S, LOAD_S
from pagoda.server.remote_admission import AdmissionService
from pagoda.server.served_adapters import AdapterChange

logger = logging.getLogger("pagoda.server")

SOCKET = "engine"  # in the rendezvous folder
_MODULE = "pagoda.server.api_process"
_END_S = 10.0
"""How long processes may take to end after the drain's deadline, before they are killed."""


class ApiStart(msgspec.Struct, frozen=True):
    """What a process needs.   folder: of the rendezvous.   listener: file descriptor of its socket."""

    config: EngineConfig
    number: int
    folder: str
    listener: int
    salt_secret: bytes


def error_path(place: RendezvousDir, number: int) -> Path:
    """Return where a process that cannot serve writes why: the message, and whether the settings are wrong."""
    return place.path(f"error-{number}")


@dataclass(slots=True, eq=False)
class _Slot:
    """A process that serves HTTP, and those that replace it.

    ready_at_s: since when the present one serves.   client: its index.   has_worked: it has had a request.
    """

    number: int
    listener: socket.socket
    process: "subprocess.Popen[bytes] | None" = None
    ready_at_s: float | None = None
    client: int | None = None
    has_worked: bool = False


async def serve_together(config: EngineConfig) -> None:
    """Serve with `api_server_count` processes until a signal; return when all have ended.

    Raises ConfigError for wrong settings, WorkerDied if an engine or a process cannot be started any more.
    """
    listeners = listen_together(config.server)
    engine = ProcessClient(config, step_timeout_s=config.server.server_timeouts.step_timeout_s)
    starting = asyncio.create_task(engine.start())
    place = RendezvousDir()
    try:
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
        self, config: EngineConfig, engine: ProcessClient, listeners: list[socket.socket], place: RendezvousDir
    ) -> None:
        self._config, self._engine, self._place = config, engine, place
        self._slots = [_Slot(number, listener) for number, listener in enumerate(listeners, 1)]
        self._has_begun = self._is_serving = self._is_draining = False
        self._salt_secret = secrets.token_bytes(16)
        limits, queue_timeout_s = config.server.server_limits, config.server.server_timeouts.queue_timeout_s
        self._admission = AdmissionService(Admission(limits, queue_timeout_s))
        self._counts_of: dict[int, Counts] = {}  # as each client told them last
        self._counts_before: Counts = {}  # of those that have gone
        self._tokens_per_step = tokens_per_step()
        self._changes: dict[str, AdapterChange] = {}  # the last one of each name
        self._changing = asyncio.Lock()
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
            "ask_all": self._ask_all,
            "counts": self._read_counts,
            "change_adapter": self._change_adapter,
            "drained": self._on_drained,
            **self._admission.services,
        }
        self._server = ClientServer(self._engine, starting, services, self._on_left)
        await self._server.start(str(self._place.path(SOCKET)))
        pass_on = self._engine.on_step

        def on_step(num_tokens: int) -> None:
            self._tokens_per_step.observe(num_tokens)
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
        if (error := self._engine.died or failure) is not None:
            raise error

    # ---- each process

    async def _keep(self, slot: _Slot) -> None:
        """Run one process after another. Raises ConfigError for wrong settings, WorkerDied if too many are useless."""
        restarts = Restarts()
        has_been_ready = False
        while not self._is_draining:
            slot.ready_at_s, slot.has_worked = None, False
            try:
                how = describe_exit(await self._run_one(slot))
            except OSError as error:
                how = f"could not be started: {error}"
            if self._is_draining:
                return
            if (known := self._error_of(slot.number)) is not None:
                how += f": {known}"
                if isinstance(known, ConfigError) and not has_been_ready:
                    raise known
            is_ready = slot.ready_at_s is not None
            has_been_ready = has_been_ready or is_ready
            is_stable = slot.ready_at_s is not None and time.monotonic() - slot.ready_at_s >= STABLE_S
            pause_s = restarts.pause_s(not (is_stable or (is_ready and slot.has_worked)), has_been_ready)
            if pause_s is None:
                times = restarts.num_fruitless
                raise WorkerDied(f"API process {slot.number} {how}, {times} times in a row before it was of any use")
            logger.error(
                "API process %d %s; starting another%s", slot.number, how, f" in {pause_s:.1f} s" * bool(pause_s)
            )
            await asyncio.sleep(pause_s)

    async def _run_one(self, slot: _Slot) -> int:
        """Start a process; return its exit code when it has ended. Raises OSError if none can be started."""
        fd, config = slot.listener.fileno(), self._config
        if slot.number > 1:  # the first one writes the trace, if one is written
            server = replace(config.server, logs=replace(config.server.logs, trace=None))
            config = replace(config, server=server)
        start = ApiStart(config, slot.number, self._place.folder, fd, self._salt_secret)
        process = slot.process = start_child(_MODULE, [], msgspec.msgpack.encode(start, enc_hook=str), [fd])
        while (code := process.poll()) is None:
            await asyncio.sleep(WATCH_INTERVAL_S)
        end_child(process)
        return code

    def _error_of(self, number: int) -> PagodaError | None:
        """Return why a process could not serve, if it has told."""
        path = error_path(self._place, number)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            text, is_config = msgspec.json.decode(path.read_bytes(), type=tuple[str, bool])
            path.unlink()
            return ConfigError(text) if is_config else WorkerDied(text)
        return None

    def _end(self, slot: _Slot) -> None:
        if slot.process is not None:
            end_child(slot.process)

    # ---- what the processes call

    async def _begin(self, client: int, number: int) -> list[AdapterChange]:
        """A process is about to listen. Return how the adapters differ from those of the settings.

        Raises ConfigError if another server has taken the port meanwhile.
        """
        slot = self._slots[number - 1]
        if not self._has_begun:
            check_free(self._config.server, slot.listener)
            self._has_begun = True
        slot.client = client
        async with self._changing:
            return list(self._changes.values())

    def _on_ready(self, client: int, number: int) -> None:
        self._slots[number - 1].ready_at_s = time.monotonic()
        if not self._is_serving and all(slot.ready_at_s is not None for slot in self._slots):
            self._is_serving = True
            announce(self._config.server, self._slots[0].listener)
            loop = asyncio.get_running_loop()
            self._tasks.add(loop.create_task(report_load(self._engine.stats, self._read_counts, self._read_oldest)))
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signal_number, self._on_signal)

    async def _ask_all(self, _: int, name: str, arguments: list[msgspec.Raw]) -> list[msgspec.Raw]:
        found = await self._server.ask(name, *arguments, timeout_s=CALL_S, returns=msgspec.Raw)
        return list(found.values())

    async def _read_counts(self, _: int = 0) -> Counts:
        self._counts_of |= await self._server.ask("counts", timeout_s=CALL_S, returns=Counts)
        total: Counts = {}
        for counts in (self._counts_before, *self._counts_of.values()):
            add_counts(total, counts)
        total[self._tokens_per_step.name] = self._tokens_per_step.counts()
        return total

    async def _read_oldest(self) -> RequestRecord | None:
        found = await self._server.ask("oldest", timeout_s=CALL_S, returns=RequestRecord | None)
        return oldest_of(found.values())

    async def _change_adapter(self, client: int, change: AdapterChange) -> Failure | None:
        """Change the adapters of all processes, once all are there; one that starts later gets the change then."""
        while True:
            async with self._changing:
                if all(slot.client is not None and slot.ready_at_s is not None for slot in self._slots):
                    found = await self._server.ask("change_adapter", change, timeout_s=LOAD_S, returns=Failure | None)
                    if (failure := next((one for one in found.values() if one is not None), None)) is None:
                        self._changes[change.name] = change
                    return failure
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _on_drained(self, client: int) -> None:
        """Return when all processes have no request any more."""
        self._drained.add(client)
        self._look_whether_drained()
        if self._is_draining:  # else, it ends alone
            await self._all_drained.wait()

    def _on_left(self, client: int) -> None:
        self._admission.end_client(client)
        add_counts(self._counts_before, self._counts_of.pop(client, {}))
        for slot in self._slots:
            if slot.client == client:
                slot.client = None
        self._look_whether_drained()

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
        self._tasks.add(loop.create_task(self._server.ask("drain", timeout_s=CALL_S)))
        for slot in self._slots:
            timeout_s = self._config.server.server_timeouts.drain_timeout_s + _END_S
            loop.call_later(timeout_s, partial(self._end, slot))
