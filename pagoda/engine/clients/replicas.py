"""Replicas: several engines that run the same model, as one EngineCoreClient.

Each replica is a ProcessClient with its own engine process, supervisor and journal. A request belongs to one of them;
its tokens are the same on any. When a replica's engine ends, the others continue with its requests at once, except for
those that may have killed it: its next engine probes these, so that a request that kills engines ends one replica only.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError, WorkerDied, fresh
from pagoda.core.events import Events, Routed
from pagoda.core.kv import hashes_of_prompt
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, only_events
from pagoda.engine import wire
from pagoda.engine.clients.client_outputs import ClientOutputs
from pagoda.engine.clients.journal import JournalEntry
from pagoda.engine.clients.process_client import ENGINE_MODULE, ProcessClient, Sink
from pagoda.engine.clients.router import Router

logger = logging.getLogger("pagoda.engine")


class Replicas(ClientOutputs):
    """The replicas of `data_parallel_size`, used as a single ProcessClient is.

    As long as one of them is up, requests are served. Their counts are added up.
    each: of the replicas.   num_moved: requests that have been moved from one to another.
    """

    index = 0

    def __init__(self, config: EngineConfig, step_timeout_s: float = 120.0, module: str = ENGINE_MODULE) -> None:
        """As for ProcessClient."""
        super().__init__()
        self._sinks: dict[int, Sink] = {0: self._outputs.put_nowait}  # by client
        if config.debug.prefix_hash_seed is None:  # one for all, so that hashes say which of them has a prefix
            config = replace(config, debug=replace(config.debug, prefix_hash_seed=secrets.randbits(64)))
        assert config.debug.prefix_hash_seed is not None
        self._hash_seed, self._block_size = config.debug.prefix_hash_seed, config.cache.block_size
        self.each = [
            ProcessClient(config, step_timeout_s, module, number, self._sinks)
            for number in range(config.server.data_parallel_size)
        ]
        for one in self.each:
            one.on_change, one.on_gone = self._move_waiting, self._on_gone
            one.on_step = self._on_step
        scheduler = config.scheduler
        self._router = Router(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self.num_moved = 0
        self.on_step: Callable[[int], object] = lambda _: None
        """Called with the number of tokens of each step of any replica."""
        self._on_events: Callable[[Events], object] | None = None

    # ---- what AsyncEngine calls

    async def start(self) -> wire.EngineSizes:
        """Start all engines; return their sizes together once all are ready: the blocks of all, the least length.

        Raises the error of the first one that does not start.
        """
        sizes = await asyncio.gather(*(one.start() for one in self.each))
        first = sizes[0]
        self._block_size = first.block_size
        self._router.max_num_seqs = first.max_num_seqs or self._router.max_num_seqs
        self._router.max_num_batched_tokens = first.max_num_batched_tokens or self._router.max_num_batched_tokens
        return msgspec.structs.replace(
            first,
            max_model_len=min(one.max_model_len for one in sizes),
            num_blocks=sum(one.num_blocks for one in sizes),
            num_host_blocks=sum(one.num_host_blocks for one in sizes),
        )

    def add_request(self, request: Request) -> None:
        if (died := self.died) is not None:
            self._put(request.client_index, died)
        else:
            self._place(JournalEntry.of(request), self._living)

    def abort(self, handles: Sequence[int], client_index: int = 0) -> None:
        for one in self.each:
            one.abort(handles, client_index)

    def finish_sequence(self, handle: int, sequence: int, status: RequestStatus, client_index: int = 0) -> None:
        for one in self.each:
            if (client_index, handle) in one:
                one.finish_sequence(handle, sequence, status, client_index)

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Return False if blocks of any replica are in use; the caches of the others are empty then."""
        if (died := self.died) is not None:
            raise fresh(died)
        return all(await asyncio.gather(*(one.reset_prefix_cache(preempt_running) for one in self._living)))

    async def load_adapter(self, lora: LoraRef) -> None:
        """Load an adapter into all engines; those that are down load it when they are up again, unless all are.

        Raises RequestError if it cannot be used, WorkerDied if it cannot be loaded into any.
        """
        if (died := self.died) is not None:
            raise fresh(died)
        asked = [one for one in self._living if one.is_up] or self._living
        for one in self.each:
            if one not in asked:
                one.load_adapter_later(lora)
        ends = await asyncio.gather(*(one.load_adapter(lora) for one in asked), return_exceptions=True)
        errors = [end for end in ends if end is not None]
        refusal = next((error for error in errors if isinstance(error, RequestError)), None)
        if refusal is not None or len(errors) == len(asked):
            self.unload_adapter(lora)
            raise refusal or errors[0]

    def unload_adapter(self, lora: LoraRef) -> None:
        """Unload an adapter from all engines, unless requests use it."""
        if not any(one.uses(lora) for one in self.each):
            for one in self.each:
                one.unload_adapter(lora)

    async def look(self, steps_after_s: float | None = None) -> wire.LookReply | None:
        """Return what the engines do now, and their steps that ended after a time; None while all are down."""
        replies = await asyncio.gather(*(one.look(steps_after_s) for one in self.each))
        found = [one for one in replies if one is not None]
        return wire.LookReply.sum_of(found) if found else None

    def stats(self) -> wire.EngineStats:
        """Return what the engines have said last, added up."""
        return wire.EngineStats.sum_of([one.stats() for one in self.each])

    async def stop(self) -> None:
        """End the engine processes, which have no requests any more, until the next `start`."""
        await asyncio.gather(*(one.stop() for one in self.each))

    async def shutdown(self) -> None:
        """End the engine processes; running requests are dropped. Idempotent."""
        await asyncio.gather(*(one.shutdown() for one in self.each))

    # ---- clients in other processes

    def connect(self, client_index: int, sink: Sink) -> None:
        """Pass what a client gets to `sink` from now on. No other client may have had this index."""
        assert client_index not in self._sinks, f"client {client_index} is connected"
        self._sinks[client_index] = sink

    def disconnect(self, client_index: int) -> None:
        """Abort all requests of a client, which has gone."""
        del self._sinks[client_index]
        for one in self.each:
            one.abort_all(client_index)

    # ---- state for operators

    @property
    def died(self) -> WorkerDied | None:
        """Return the reason why no engine of any replica can be started any more, or None."""
        return None if self._living else self.each[-1].died

    @property
    def num_deaths(self) -> int:
        return sum(one.num_deaths for one in self.each)

    @property
    def is_up(self) -> bool:
        """Whether the engine process of any replica is ready and running."""
        return any(one.is_up for one in self.each)

    @property
    def is_stuck(self) -> bool:
        """Whether all engines that are up have work and have made no progress for longer than steps can explain."""
        return self.is_up and all(one.is_stuck for one in self.each if one.is_up)

    @property
    def on_events(self) -> Callable[[Events], object] | None:
        """What is called with the events of the requests of all clients."""
        return self._on_events

    @on_events.setter
    def on_events(self, listener: Callable[[Events], object] | None) -> None:
        self._on_events = listener
        for one in self.each:
            one.on_events = listener

    async def wait_until_gone(self) -> None:
        """Wait until no engine of any replica can be started any more, or until after `shutdown`."""
        await asyncio.gather(*(one.wait_until_gone() for one in self.each))

    # ---- where requests are

    @property
    def _living(self) -> list[ProcessClient]:
        return [one for one in self.each if one.died is None]

    def _place(self, entry: JournalEntry, among: Sequence[ProcessClient]) -> None:
        """Give a request to the replica where its first token is expected earliest; tell its client why."""
        request = entry.request
        among = [one for one in among if not one.is_stuck] or among  # one that hangs is not yet known to be dead
        caches = [one.cached for one in among] if request.reads_prefix_cache else []
        hashes = [
            *itertools.takewhile(
                lambda block: any(block in cached for cached in caches),
                hashes_of_prompt(request, self._hash_seed, self._block_size),
            )
        ]
        loads = [replace(one.load, num_cached=self._num_cached(one, hashes)) for one in among]
        index, because = self._router.choose(entry.num_tokens, len(entry.live), loads)
        entry.num_cached = loads[index].num_cached
        number = self.each.index(among[index]) + 1
        event = Routed(0, time.monotonic(), request.client_index, request.handle, number, because.value)
        self._put(request.client_index, only_events([event]))
        among[index].adopt(entry)

    def _num_cached(self, one: ProcessClient, hashes: Sequence[bytes]) -> int:
        """Return how many tokens of a prompt a replica has in its prefix cache, as far as it has told."""
        return self._block_size * sum(1 for _ in itertools.takewhile(one.cached.__contains__, hashes))

    def _move_waiting(self) -> None:
        """Move requests that wait for a replica to those that take requests now."""
        ready = [one for one in self._living if one.takes_requests]
        for one in self.each if ready else ():
            for entry in one.release():
                self.num_moved += 1
                self._place(entry, ready)

    def _on_gone(self, error: WorkerDied) -> None:
        """No engine of a replica can be started any more: the others go on, if there are others."""
        if self.died is not None:
            for client_index in self._sinks:
                self._put(client_index, error)
            return
        logger.error("%d of %d replicas go on", len(self._living), len(self.each))
        self._move_waiting()

    def _put(self, client_index: int, item: EngineCoreOutputs | WorkerDied) -> None:
        if (sink := self._sinks.get(client_index)) is not None:
            sink(item)

    def _on_step(self, num_tokens: int) -> None:
        self.on_step(num_tokens)


EngineOwner = ProcessClient | Replicas
"""What starts the engines of a model, in this process."""


def own_engines(config: EngineConfig) -> EngineOwner:
    """Return what will run the engines that the settings ask for."""
    make = ProcessClient if config.server.data_parallel_size == 1 else Replicas
    return make(config, step_timeout_s=config.server.server_timeouts.step_timeout_s)
