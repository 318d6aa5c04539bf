"""Shared: what the processes that serve one port have in common, in their parent, which owns it."""

import asyncio
from collections.abc import Callable

import msgspec

from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import Services
from pagoda.engine.clients.client_server import ClientServer
from pagoda.metrics.counts import Counts, add_counts, tokens_per_step
from pagoda.server.admission import Admission
from pagoda.server.one_process import Failure, RequestRecord, oldest_of
from pagoda.server.peers import CALL_S, LOAD_S
from pagoda.server.remote_admission import AdmissionService
from pagoda.server.served_adapters import AdapterChange

_LOOK_S = 0.1


class Shared:
    """Admission, counts and adapters of all processes.

    server: to which they are connected; set before anything else is used.
    tokens_per_step: of the engine, which no process counts for the others.
    """

    server: ClientServer

    def __init__(self, config: ServerConfig, are_all_ready: Callable[[], bool]) -> None:
        """are_all_ready: whether as many processes serve as should."""
        self._are_all_ready = are_all_ready
        admission = Admission(config.server_limits, config.server_timeouts.queue_timeout_s)
        self._admission = AdmissionService(admission)
        self._counts_of: dict[int, Counts] = {}  # as each client told them last
        self._counts_before: Counts = {}  # of those that have gone
        self.tokens_per_step = tokens_per_step()
        self._changes: dict[str, AdapterChange] = {}  # the last one of each name
        self._changing = asyncio.Lock()
        self._changes_begun: set[asyncio.Task[Failure | None]] = set()

    @property
    def services(self) -> Services:
        """What the processes may call."""
        return {
            "ask_all": self._ask_all,
            "counts": self._counts,
            "change_adapter": self._change_adapter,
            **self._admission.services,
        }

    def has_admitted(self, client: int) -> bool:
        """Return whether a process has had a request."""
        return self._admission.has_admitted(client)

    def on_left(self, client: int) -> None:
        """A process has gone: its requests count no longer, what it has counted is kept."""
        self._admission.end_client(client)
        add_counts(self._counts_before, self._counts_of.pop(client, {}))

    async def _ask_all(self, _: int, name: str, arguments: list[msgspec.Raw]) -> list[msgspec.Raw]:
        found = await self.server.ask(name, *arguments, timeout_s=CALL_S, returns=msgspec.Raw)
        return list(found.values())

    async def _counts(self, _: int) -> Counts:
        return await self.read_counts()

    async def read_counts(self) -> Counts:
        """Return what all processes have counted: of one that does not answer, or has gone, what it told last."""
        found = await self.server.ask("counts", timeout_s=CALL_S, returns=Counts)
        # One that went while others were waited for has been added to `_counts_before`.
        self._counts_of |= {client: counts for client, counts in found.items() if client in self.server.clients}
        total: Counts = {}
        for counts in (self._counts_before, *self._counts_of.values()):
            add_counts(total, counts)
        total[self.tokens_per_step.name] = self.tokens_per_step.counts()
        return total

    async def read_oldest(self) -> RequestRecord | None:
        """Return the request that runs for longest."""
        found = await self.server.ask("oldest", timeout_s=CALL_S, returns=RequestRecord | None)
        return oldest_of(found.values())

    async def read_changes(self) -> list[AdapterChange]:
        """Return how the adapters differ from those of the settings."""
        async with self._changing:
            return list(self._changes.values())

    async def _change_adapter(self, _: int, change: AdapterChange) -> Failure | None:
        """Change the adapters of all processes, once all are there; one that starts later reads the changes.

        Also if the process that asks dies meanwhile: the others may have made the change.
        """
        task = asyncio.create_task(self._change_all(change))
        self._changes_begun.add(task)
        task.add_done_callback(self._changes_begun.discard)
        return await asyncio.shield(task)

    async def _change_all(self, change: AdapterChange) -> Failure | None:
        while True:
            async with self._changing:
                if self._are_all_ready():
                    found = await self.server.ask("change_adapter", change, timeout_s=LOAD_S, returns=Failure | None)
                    if (failure := next((one for one in found.values() if one is not None), None)) is None:
                        self._changes[change.name] = change
                    return failure
            await asyncio.sleep(_LOOK_S)
