"""What all clients share: the outputs of steps; and the ways to the clients of an engine."""

import asyncio
from collections.abc import Callable

from pagoda.base.errors import PagodaError, WorkerDied
from pagoda.core.scheduler_output import EngineCoreOutputs

Sink = Callable[[EngineCoreOutputs | WorkerDied], object]
"""Takes what a client gets of the steps, or the error that ended the engine for good."""


class Sinks:
    """Where each client of an engine, or of several replicas, gets its outputs.   own: the sink of client 0."""

    def __init__(self, own: Sink) -> None:
        self._sinks = {0: own}

    def connect(self, client_index: int, sink: Sink) -> None:
        """Pass what a client gets to `sink` from now on. No other client may have had this index."""
        assert client_index not in self._sinks, f"client {client_index} is connected"
        self._sinks[client_index] = sink

    def disconnect(self, client_index: int) -> None:
        del self._sinks[client_index]

    def put(self, client_index: int, item: EngineCoreOutputs | WorkerDied) -> None:
        """Pass something to a client, unless it has gone."""
        if (sink := self._sinks.get(client_index)) is not None:
            sink(item)

    def put_to_all(self, error: WorkerDied) -> None:
        for client_index in self._sinks:
            self.put(client_index, error)


class ClientOutputs:
    """The part of an EngineCoreClient that all clients share."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[EngineCoreOutputs | PagodaError] = asyncio.Queue()

    async def next_outputs(self) -> EngineCoreOutputs:
        """Return the next step's outputs, to a single consumer. Raises the error that ended the engine for good."""
        item = await self._outputs.get()
        if isinstance(item, PagodaError):
            raise item
        return item
