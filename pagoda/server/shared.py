"""Shared: what the processes that serve one port have in common, in their parent, which owns it."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import Services, services_of
from pagoda.engine.clients.client_server import ClientServer
from pagoda.metrics.counts import ModelCounts, add_model_counts, tokens_per_step
from pagoda.server.admission import Admission
from pagoda.server.errors import ApiError
from pagoda.server.owned import Owned
from pagoda.server.peers import CALL_S, LOAD_S
from pagoda.server.remote_admission import AdmissionService
from pagoda.server.served_adapters import AdapterChange, Failure, parse_module

_LOOK_S = 0.1
_WAIT_S = 60.0
"""So long a change of adapters waits until all processes serve."""


class Shared:
    """Admission, counts, adapters and stored responses of all processes.

    server: to which they are connected; set before anything else is used.
    tokens_per_step: of the engine, which no process counts for the others.
    """

    server: ClientServer

    def __init__(self, config: ServerConfig, are_all_ready: Callable[[], bool]) -> None:
        """are_all_ready: whether as many processes serve as should. Raises ConfigError for wrong settings."""
        self._are_all_ready = are_all_ready
        admission = Admission(config.server_limits, config.server_timeouts.queue_timeout_s)
        self._admission = AdmissionService(admission)
        self._counts_of: dict[int, ModelCounts] = {}  # as each client last reported them
        self._counts_before: ModelCounts = {}  # of those that have gone
        self.tokens_per_step = tokens_per_step()
        modules = [parse_module(text) for text in config.lora_sources.lora_modules]
        self._adapters = {one.name: AdapterChange(one.name, one, replaces=True) for one in modules}  # what loads each
        self._owned = Owned(config)
        self._changing = asyncio.Lock()
        self._changes_begun: set[asyncio.Task[Failure | None]] = set()

    @property
    def services(self) -> Services:
        """What the processes may call."""
        return {
            "ask_all": self._ask_all,
            "counts": self._counts,
            "change_adapter": self._change_adapter,
            **services_of(self._admission),
            **self._owned.services,
        }

    def has_admitted(self, client: int) -> bool:
        """Return whether a process has had a request."""
        return self._admission.has_admitted(client)

    def on_left(self, client: int) -> None:
        """A process has gone: its requests count no longer, what it has counted and stored is kept."""
        self._admission.end_client(client)
        self._owned.end_client(client)
        add_model_counts(self._counts_before, self._counts_of.pop(client, {}))

    def close(self) -> None:
        """Write what waits to be written."""
        self._owned.close()

    async def _ask_all(self, _: int, name: str, arguments: list[msgspec.Raw]) -> list[msgspec.Raw]:
        found = await self.server.ask(name, *arguments, timeout_s=CALL_S, returns=msgspec.Raw)
        return list(found.values())

    async def _counts(self, _: int) -> ModelCounts:
        return await self.read_counts()

    async def read_counts(self) -> ModelCounts:
        """Return what all processes have counted; of one that does not answer, or has gone, its last report."""
        found = await self.server.ask("counts", timeout_s=CALL_S, returns=ModelCounts)
        # One that went while others were waited for has been added to `_counts_before`.
        self._counts_of |= {client: counts for client, counts in found.items() if client in self.server.clients}
        total: ModelCounts = {}
        for counts in (self._counts_before, *self._counts_of.values()):
            add_model_counts(total, counts)
        for of_model in total.values():  # there is one, as there is one engine
            of_model[self.tokens_per_step.name] = self.tokens_per_step.counts()
        return total

    async def read_changes(self) -> list[AdapterChange]:
        """Return what loads the adapters that are served."""
        async with self._changing:
            return list(self._adapters.values())

    async def _change_adapter(self, _: int, change: AdapterChange) -> None:
        """Change the adapters of all processes, once all are there; one that starts later reads the changes.

        Also if the process that asks dies meanwhile: the others may have made the change. Raises ApiError.
        """
        task = asyncio.create_task(self._change_all(change))
        self._changes_begun.add(task)
        task.add_done_callback(self._changes_begun.discard)
        if (failure := await asyncio.shield(task)) is not None:
            raise ApiError(*failure)

    async def _change_all(self, change: AdapterChange) -> Failure | None:
        until_s = time.monotonic() + _WAIT_S
        while time.monotonic() < until_s:
            async with self._changing:
                if self._are_all_ready():
                    return await self._change_now(change)
            await asyncio.sleep(_LOOK_S)
        return 503, f"a process of the server has not served for {_WAIT_S:g} s: no adapter is changed; try later", None

    async def _change_now(self, change: AdapterChange) -> Failure | None:
        """Remove a name wherever it is; add one in all processes, or in none: those that could take it back."""
        outcomes = await self._ask_all_to(change)
        failure = next((one for one in outcomes if one is not None), None)
        if change.removes:
            self._adapters.pop(change.name, None)
            return None if None in outcomes else failure  # a process that could not load it has none to unload
        if failure is None:
            # What was copied may be removed before a process that starts later reads the changes.
            source = self._adapters.get(change.copy_of or "", change)
            self._adapters[change.name] = source.named(change.name)
        elif None in outcomes:
            await self._ask_all_to(self._adapters.get(change.name, AdapterChange(change.name)))
        return failure

    async def _ask_all_to(self, change: AdapterChange) -> list[Failure | None]:
        found = await self.server.ask("change_adapter", change, timeout_s=LOAD_S, returns=Failure | None)
        return list(found.values())
