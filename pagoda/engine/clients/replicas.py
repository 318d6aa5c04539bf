"""Replicas: several engines that run the same model, as one EngineCoreClient.

Each replica is a ProcessClient with its own engine process, supervisor and journal. A request belongs to one of them;
its tokens are the same on any. When a replica's engine ends, the others continue with its requests at once, except for
those that may have killed it: its next engine probes these, so that a request that kills engines ends one replica only.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from pagoda.base.abbreviate import shown_id
from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError, WorkerDied, fresh
from pagoda.core.events import Events, Routed
from pagoda.core.kv import hashes_of_prompt
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import only_events
from pagoda.engine import wire
from pagoda.engine.clients.client_outputs import ClientOutputs, Sinks
from pagoda.engine.clients.journal import JournalEntry, error_outputs
from pagoda.engine.clients.process_client import ENGINE_MODULE, NO_WEIGHTS, ProcessClient
from pagoda.engine.clients.router import PrefixIndex, RoutedBecause, Router
from pagoda.tier import hash_seed

logger = logging.getLogger("pagoda.engine")

_LOOK_S = 1.0
"""How long a look waits for engines that do not reply, when others have."""


class Replicas(ClientOutputs):
    """The replicas of `data_parallel_size`, used as a single ProcessClient is.

    As long as one of them is up, requests are served. Their counts are added up.
    each: of the replicas.   num_moved: requests that have been moved from one to another.
    """

    index = 0

    def __init__(self, config: EngineConfig, step_timeout_s: float = 120.0, module: str = ENGINE_MODULE) -> None:
        """As for ProcessClient."""
        super().__init__()
        self.sinks = Sinks(self._outputs.put_nowait)
        seed = hash_seed(config)  # one for all, so that hashes say which of them has a prefix
        if seed is None:
            seed = secrets.randbits(64)
        config = replace(config, debug=replace(config.debug, prefix_hash_seed=seed))
        self._hash_seed = seed
        self._block_size = config.cache.block_size
        self._prefixes = PrefixIndex()
        scheduler = config.scheduler
        self._router = Router(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self.each = [
            ProcessClient(config, step_timeout_s, module, number, self.sinks)
            for number in range(config.server.data_parallel_size)
        ]
        for one in self.each:
            one.on_change, one.on_gone = self._move_waiting, self._on_gone
            one.on_step, one.on_events = self._on_step, self._pass_on_events
            one.on_stranded = self._place_again
            one.others = [other for other in self.each if other is not one]
            one.prefixes, one.costs = self._prefixes, self._router.costs
        self.num_moved = 0
        self._is_restarting = False
        self.on_step: Callable[[int], object] = lambda _: None
        """Called with the number of tokens of each step of any replica."""
        self.on_events: Callable[[Events], object] | None = None
        """Called with the events of the requests of all clients."""

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
            self.sinks.put(request.client_index, died)
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
        asked = [one for one in self._living if one.takes_loads]
        tries = await asyncio.gather(*(one.try_load_adapter(lora) for one in asked), return_exceptions=True)
        errors = [end for end in tries if isinstance(end, BaseException)]
        loaded = [one for one, end in zip(asked, tries, strict=True) if end is True]
        if not errors and not loaded:  # none is up, or all have died meanwhile
            loaded = self._living
            ends = await asyncio.gather(*(one.load_adapter(lora) for one in loaded), return_exceptions=True)
            errors = [end for end in ends if end is not None]
        refusal = next((error for error in errors if isinstance(error, RequestError)), None)
        if refusal is not None or (errors and len(errors) == len(loaded)):
            self.unload_adapter(lora)
            raise refusal or errors[0]
        for one in self._living:
            if one not in loaded:
                one.load_adapter_later(lora)

    def unload_adapter(self, lora: LoraRef) -> None:
        """Unload an adapter from all engines, unless requests use it."""
        if not any(one.uses(lora) for one in self.each):
            for one in self.each:
                one.unload_adapter(lora)

    async def look(self, steps_after_s: float | None = None) -> wire.LookReply | None:
        """Return what the engines do now, and their steps that ended after a time; None while all are down.

        Without those that have not replied soon, unless none has.
        """
        looks = [asyncio.ensure_future(one.look(steps_after_s)) for one in self.each]
        try:
            _, late = await asyncio.wait(looks, timeout=_LOOK_S)
            while late and not any(look.done() and look.result() for look in looks):
                _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for look in looks:
                look.cancel()  # one whose engine hangs, or is in a long step
        found = [(number, look.result()) for number, look in enumerate(looks, 1) if look.done()]
        replies = [reply.of_replica(number) for number, reply in found if reply is not None]
        return wire.LookReply.sum_of(replies) if replies else None

    def stats(self) -> wire.EngineStats:
        """Return what the engines have said last, added up."""
        return wire.EngineStats.sum_of([one.stats() for one in self.each])

    async def stop(self) -> None:
        """End the engine processes, which have no requests any more, until the next `start`."""
        await asyncio.gather(*(one.stop() for one in self.each))

    @property
    def source(self) -> wire.WeightsSource | None:
        """Of the weights of all, where a restart was given one."""
        return self.each[-1].source

    async def restart(self, source: wire.WeightsSource | None = None) -> None:
        """Restart one replica after the other. No request ends with an error: see ProcessClient.

        Raises RequestError if that is done already, WorkerDied if one cannot be started any more, ConfigError if one
        cannot be with these weights: then it has those of before, and so have the replicas after it.
        """
        if self._is_restarting:
            raise RequestError("the engines are being restarted already")
        self._is_restarting = True
        try:
            for one in self._living:
                await one.restart(source)
        finally:
            self._is_restarting = False

    async def shutdown(self) -> None:
        """End the engine processes; running requests are dropped. Idempotent."""
        await asyncio.gather(*(one.shutdown() for one in self.each))

    # ---- clients in other processes, which `sinks` connects

    def abort_all(self, client_index: int) -> None:
        """Abort all requests of a client."""
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

    def queue_s(self, num_more: int = 0) -> float:
        """As of a ProcessClient: the least of the replicas."""
        return min((one.queue_s(num_more) for one in self._living), default=0.0)

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
        if entry.needs_weights:
            able = [one for one in self._living if one.can_run(entry)]
            among = [one for one in among if one in able] or able
            if not among:
                self.sinks.put(request.client_index, error_outputs(request, NO_WEIGHTS, live=entry.live))
                return
        among = [one for one in among if not one.is_stuck] or among  # one that hangs is not yet known to be dead
        numbers = [one.number for one in among]
        hashes = hashes_of_prompt(request, self._hash_seed, self._block_size) if request.reads_prefix_cache else ()
        num_cached = [count * self._block_size for count in self._prefixes.num_leading(hashes, numbers)]
        loads = [one.load for one in among]
        index, because = self._router.choose(entry.num_tokens, len(entry.live), loads, num_cached)
        entry.num_cached = num_cached[index]
        self._tell(entry, among[index], because)
        among[index].adopt(entry)

    def _move_waiting(self) -> None:
        """Move requests that wait for a replica to those that take requests now."""
        ready = [one for one in self._living if one.takes_requests]
        for one in self.each if ready else ():
            for entry in one.release(ready):
                self.num_moved += 1
                try:
                    self._place(entry, ready)
                except Exception as error:  # the others go on
                    logger.exception("request %s could not be moved", shown_id(entry.request.request_id))
                    reason = f"the request could not be moved to another replica: {type(error).__name__}: {error}"
                    self.sinks.put(entry.request.client_index, error_outputs(entry.request, reason, live=entry.live))
        for one in self.each:
            idle = next((other for other in ready if other.is_idle), None)
            if idle is not None and (suspects := one.release_suspects(idle)):
                self.num_moved += len(suspects)
                for entry in suspects:
                    self._tell(entry, idle, RoutedBecause.PROBE)
                idle.probe(suspects)

    def _tell(self, entry: JournalEntry, one: ProcessClient, because: RoutedBecause) -> None:
        """Tell the client of a request where it goes."""
        client_index, handle = entry.request.key
        event = Routed(0, time.monotonic(), client_index, handle, one.number + 1, because.value)
        self.sinks.put(client_index, only_events([event]))

    def _on_gone(self, error: WorkerDied) -> None:
        """No engine of a replica can be started any more: the others go on, if there are others."""
        if self.died is not None:
            self.sinks.put_to_all(error)
        else:
            logger.error("%d of %d replicas go on", len(self._living), len(self.each))
            self._move_waiting()

    def _place_again(self, entry: JournalEntry) -> None:
        """A replica has come back with other weights than this request has begun with."""
        self._place(entry, self._living)

    def _on_step(self, num_tokens: int) -> None:
        self.on_step(num_tokens)

    def _pass_on_events(self, events: Events) -> None:
        if self.on_events is not None:
            self.on_events(events)


EngineOwner = ProcessClient | Replicas
"""What starts the engines of a model, in this process."""


def own_engines(config: EngineConfig) -> EngineOwner:
    """Return what will run the engines that the settings ask for."""
    make = ProcessClient if config.server.data_parallel_size == 1 else Replicas
    return make(config, step_timeout_s=config.server.server_timeouts.step_timeout_s)
