"""ProcessClient: run requests in an engine process that is restarted if it dies, without losing one of them.

It sends the requests of all clients to the process, and records every token in the Journal before its client gets it.
When the process ends or hangs, the Supervisor starts another one, and this replays the running requests, those that may
have killed it one at a time (Suspects). If no engine can be started any more, every caller gets WorkerDied.

Adapters that were loaded last, as many as it keeps, are loaded into the next engine as well, but not again if that dies
before it replies: requests carry their adapter, and an engine reads one that it does not hold, so that this only saves
a request the wait.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagoda.base.abbreviate import shown_id
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, RequestError, WorkerDied, fresh
from pagoda.core.events import Events
from pagoda.core.request import LoraRef, Request, RequestKey, RequestStatus
from pagoda.engine import wire
from pagoda.engine.clients.calls import Calls
from pagoda.engine.clients.client_outputs import ClientOutputs, Sinks
from pagoda.engine.clients.journal import Journal, JournalEntry, Suspects, error_outputs
from pagoda.engine.clients.router import PrefixIndex, ReplicaLoad, StepCosts
from pagoda.engine.clients.supervisor import Supervisor
from pagoda.engine.flight_recorder import FlightRecord

logger = logging.getLogger("pagoda.engine")

_MAX_LOADS = 2  # of one call to load an adapter, in as many engines

_POLL_S = 0.02  # whether an engine that is restarted has got further

_NO_ENGINE = WorkerDied("there is no engine now")

NO_WEIGHTS = "the engine has ended, and none has the weights any more with which this answer has begun: ask again"

ENGINE_MODULE = "pagoda.assembly.engine_process"


class ProcessClient(ClientOutputs):
    """An EngineCoreClient over a child process (ZeroMQ, msgpack), and the way to it for clients in other processes.

    The methods of EngineCoreClient are those of client 0. Others connect to `sinks`, and give their index in each call.
    index: of this client.
    step_timeout_s: an engine that has work and makes no progress for so long counts as dead; see EngineLink.
    module: what the child process runs.   number: of this engine among replicas, which share their `sinks`.
    """

    index = 0

    def __init__(
        self,
        config: EngineConfig,
        step_timeout_s: float = 120.0,
        module: str = ENGINE_MODULE,
        number: int = 0,
        sinks: Sinks | None = None,
    ) -> None:
        super().__init__()
        self._supervisor = Supervisor(config, module, step_timeout_s, self, number)
        self._journal = Journal()
        self._codec = wire.Codec(wire.FromEngine)
        self.sinks = Sinks(self._outputs.put_nowait) if sinks is None else sinks
        self._suspects = Suspects(self._journal)
        self._calls = Calls(self._send, {})  # of the engine, or of none
        self._calls.end(_NO_ENGINE)
        self.number = number
        self.prefixes = PrefixIndex()
        """Where the blocks in the prefix cache are noted, as far as the engine tells; replicas share one."""
        self.costs = StepCosts()
        """Where it is noted what steps take; replicas share one."""
        self._num_unmeasured = self._num_unreported = 0  # tokens of steps since the last statistics; of those, sampled
        self._loaded: dict[str, LoraRef] = {}  # adapters, by digest
        self._loads_again: list[asyncio.Task[None]] = []
        self._num_kept = config.model.lora.num_kept
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._num_unloads: Counter[str] = Counter()
        self._takes_loads = asyncio.Event()
        self._stats = self._measured = wire.EngineStats()
        self._of_ended: wire.EngineStats | None = None  # the counts of engines before this one
        self._busy_since_s = 0.0
        self.is_stopped = False
        """No engine is wanted now: adapters are loaded into the next one."""
        self._is_draining = False
        self.others: Sequence[ProcessClient] = ()
        """Replicas."""
        self.source: wire.WeightsSource | None = None
        """Of the weights of the last restart that was given one."""
        self._drain_s = config.server.server_timeouts.drain_timeout_s
        self.on_step: Callable[[int], object] = lambda _: None
        """Called with the number of tokens of each step."""
        self.on_events: Callable[[Events], object] | None = None
        """Called with the events of the requests of all clients, those of one after those of the other."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when this begins or ceases to take requests, or has none any more."""
        self.on_stranded: Callable[[JournalEntry], object] = lambda entry: self._end_entry(entry, NO_WEIGHTS)
        """Called with a request that this has no longer, because the next engine has other weights."""
        self.on_gone: Callable[[WorkerDied], object] = self.sinks.put_to_all
        """Called when no engine can be started any more, with the reason."""

    # ---- what AsyncEngine calls

    async def start(self) -> wire.EngineSizes:
        """Start the engine, also after `stop`; return its sizes once it is ready.

        Raises ConfigError for settings that cannot work, WorkerDied for an engine that does not start.
        """
        self.is_stopped = False
        sizes = await self._supervisor.start()
        self._max_num_batched_tokens = sizes.max_num_batched_tokens or self._max_num_batched_tokens
        return sizes

    async def stop(self) -> None:
        """End the engine process, which has no requests any more, until the next `start`. Adapters come back then."""
        self.is_stopped = True
        await self._supervisor.shutdown()
        self.on_lost()
        for entry in list(self._journal):  # of an engine that has died for good: their callers have the error
            self._journal.close(entry.request.key)
        while not self._outputs.empty():
            self._outputs.get_nowait()

    def add_request(self, request: Request) -> None:
        if self.died is not None:
            self.sinks.put(request.client_index, self.died)
            return
        self.adopt(JournalEntry.of(request))

    def abort(self, handles: Sequence[int], client_index: int = 0) -> None:
        known = [key for handle in handles if (key := (client_index, handle)) in self._journal]
        for key in known:
            self._journal.close(key)
        if known:
            self._calls.post("abort", known)
            self._send_next()

    def finish_sequence(self, handle: int, sequence: int, status: RequestStatus, client_index: int = 0) -> None:
        key = (client_index, handle)
        self._journal.end_sequence(key, sequence)
        self._calls.post("finish_sequence", key, sequence, status)
        self._send_next()

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Return False if blocks are in use. Return True while the engine is down: its cache is gone."""
        if self.died is not None:
            raise fresh(self.died)
        try:
            return await self._calls.call("reset_prefix_cache", preempt_running, returns=bool)
        except WorkerDied:
            return True

    async def load_adapter(self, lora: LoraRef) -> None:
        """Load an adapter; wait for an engine if there is none. If it dies meanwhile, try once more, in the next one.

        Raises RequestError if it cannot be used, WorkerDied if two engines die meanwhile or none can be started.
        """
        if self.is_stopped:
            self.load_adapter_later(lora)
            return
        num_unloads = self._num_unloads[lora.digest]
        for _ in range(_MAX_LOADS):
            while not self._takes_loads.is_set():
                await self._takes_loads.wait()
            if self.died is not None:
                raise fresh(self.died)
            if num_unloads < self._num_unloads[lora.digest]:  # it is not wanted any more
                return
            if await self.try_load_adapter(lora):
                return
        raise WorkerDied(f"engines died while they loaded the adapter {lora.name!r}")

    async def try_load_adapter(self, lora: LoraRef) -> bool:
        """Load an adapter into the engine that is there. Return False if that has died, or dies meanwhile.

        Raises RequestError if it cannot be used.
        """
        num_unloads = self._num_unloads[lora.digest]
        try:
            await self._calls.call("load_adapter", lora)
        except WorkerDied:
            return False
        except RequestError:
            self._loaded.pop(lora.digest, None)
            raise
        if num_unloads == self._num_unloads[lora.digest]:
            self._loaded[lora.digest] = lora
        return True

    def load_adapter_later(self, lora: LoraRef) -> None:
        """Load an adapter into the next engine."""
        self._loaded[lora.digest] = lora

    def uses(self, lora: LoraRef) -> bool:
        """Return whether a request uses an adapter."""
        used = (entry.request.lora for entry in self._journal)
        return any(one is not None and one.digest == lora.digest for one in used)

    def unload_adapter(self, lora: LoraRef) -> None:
        """Unload an adapter, also after loads of it that have no reply yet.

        Not while requests use it: those are of other clients, of which the last one unloads it.
        """
        if self.uses(lora):
            return
        self._loaded.pop(lora.digest, None)
        self._num_unloads[lora.digest] += 1
        self._calls.post("unload_adapter", lora)

    async def look(self, steps_after_s: float | None = None) -> wire.LookReply | None:
        """Return what the engine does now, and its steps that ended after a time; None while it is down."""
        try:
            return await self._calls.call("look", steps_after_s, returns=wire.LookReply)
        except WorkerDied:
            return None

    def stats(self) -> wire.EngineStats:
        """Return what the engine has said last, with the counts of those before it.

        Requests that it does not know yet, during a step, wait.
        """
        ended = self._of_ended  # with many replicas, sums take longest of all that is done when requests end
        stats = replace(self._stats) if ended is None else wire.EngineStats.sum_of((self._stats, ended))
        stats.num_waiting += max(0, len(self._journal) - stats.num_requests)
        stats.at_s = max(stats.at_s, self._busy_since_s)
        stats.num_gone = int(self.died is not None)
        stats.num_draining = int(self._is_draining and self.is_up)
        stats.num_up = int(self.is_up) - stats.num_draining
        stats.num_starting = int(not self.is_up and not stats.num_gone)
        return stats

    async def restart(self, source: wire.WeightsSource | None = None) -> None:
        """End the engine process and wait for the next one. No request ends with an error.

        First it gets no new requests, and has the time of a drain to finish those that it has; what is left continues
        on other replicas, else on the next engine.
        source: of new weights. Then it has all the time that it needs, while no other replica has its weights.
        Raises WorkerDied if none can be started any more, ConfigError if none can with these weights: the next engine
        has those of before then.
        """
        is_new = source is None and not self.is_up
        while not is_new:
            await self._wait_until_up()
            number = self._supervisor.process_number
            is_new = await self._drain(keeps_weights=source is not None) or source is None
            if self._is_draining:
                self._supervisor.restart(source)
            await self._wait_until_up(number)
        await self._wait_until_up()
        if source is not None:
            if (why := self._supervisor.refusal) is not None:
                raise ConfigError(f"{source.model}: an engine cannot start with these weights: {why}")
            self.source = source

    async def _drain(self, keeps_weights: bool) -> bool:
        """Take no new requests, and wait until the engine has none. Return False if it has died meanwhile.

        keeps_weights: beyond the time of a drain, too, while no other replica can continue with the same weights.
        """
        number, until_s = self._supervisor.process_number, time.monotonic() + self._drain_s
        self._is_draining = True
        self.on_change()
        try:
            while self._is_draining and any(entry.entered_process == number for entry in self._journal):
                can_move = any(one.takes_requests and one.weights == self.weights for one in self.others)
                if time.monotonic() >= until_s and (can_move or not keeps_weights):
                    break
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self._is_draining = False
            if self.takes_requests:
                for entry in self._suspects.unsent():
                    self._enter(entry)
            self.on_change()
            raise
        return self._is_draining

    async def _wait_until_up(self, after: int = 0) -> None:
        """Wait for an engine, with a later number than `after`. Raises WorkerDied if none can be started any more."""
        while self._supervisor.process_number == after or not self.is_up:
            if self.died is not None:
                raise fresh(self.died)
            await asyncio.sleep(_POLL_S)

    async def shutdown(self) -> None:
        """End the engine process; running requests are dropped. Idempotent."""
        await self._supervisor.shutdown()

    # ---- clients in other processes, which `sinks` connects

    def abort_all(self, client_index: int) -> None:
        """Abort all requests of a client."""
        self.abort([handle for _, handle in self._journal.of_client(client_index)], client_index)

    # ---- next to other replicas

    @property
    def takes_requests(self) -> bool:
        """Whether an engine gets a request that is added now, at once."""
        return self.is_up and not self._suspects.is_probing and not self._is_draining

    @property
    def takes_loads(self) -> bool:
        """Whether an adapter can be loaded at once."""
        return self.is_up and self._takes_loads.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether this takes requests and has none."""
        return self.takes_requests and not len(self._journal)

    @property
    def load(self) -> ReplicaLoad:
        """Return what this engine has to do."""
        return ReplicaLoad(self.takes_requests, self._journal.num_seqs, self._journal.num_owed, self.number)

    def queue_s(self, num_more: int = 0) -> float:
        """Return how long the engine computes until all requests have their next token, and so many more tokens.

        0 while it is not known what steps take.
        """
        num_tokens = self._journal.num_owed + num_more
        return self.costs.seconds(num_tokens, self.load, self._max_num_batched_tokens) if self.costs.are_known else 0.0

    @property
    def weights(self) -> str:
        """A digest of the weights of the engine, or of the last one while there is none."""
        return self._supervisor.weights

    def can_run(self, entry: JournalEntry) -> bool:
        """Return whether the engine has the weights with which a request must continue."""
        return entry.needs_weights in ("", self.weights)

    def __contains__(self, key: RequestKey) -> bool:
        """Return whether this has an unfinished request."""
        return key in self._journal

    def release(self, others: "Sequence[ProcessClient]") -> list[JournalEntry]:
        """Remove and return the requests that wait here, and that one of the others can run.

        Not those that may have killed an engine: the next one finds out, and no other engine ends with it. If there
        will be none, they have to go, too, and all others.
        """
        if self.died is not None:
            found = list(self._journal)
        else:
            number = self._supervisor.process_number
            found = [
                entry
                for entry in self._journal
                if entry.entered_process != number
                and not entry.is_suspect
                and any(other.can_run(entry) for other in others)
            ]
        for entry in found:
            self._journal.close(entry.request.key)
            entry.is_suspect, entry.entered_process = False, 0
        return found

    def release_suspects(self, other: "ProcessClient") -> list[JournalEntry]:
        """Remove and return the requests that may have killed the engine, unless the next one is there and tries them.

        Those that the other can run, in the order in which they are tried.
        """
        found = [] if self.is_up else [entry for entry in self._suspects.in_order() if other.can_run(entry)]
        for entry in found:
            self._journal.close(entry.request.key)
            entry.entered_process = 0
        return found

    def probe(self, suspects: Sequence[JournalEntry]) -> None:
        """Try requests that may have killed the engine of another replica, one at a time. This one is idle."""
        self._takes_loads.clear()
        self._busy_since_s = time.monotonic()
        for entry in suspects:
            self._journal.add(entry)
        for entry in self._suspects.begin(self._supervisor.process_number):
            self._enter(entry)

    def adopt(self, entry: JournalEntry) -> None:
        """Run a request, or continue with one that another engine had and that is not there any more."""
        if not len(self._journal):
            self._busy_since_s = time.monotonic()
        self._journal.add(entry)
        if self.takes_requests:
            self._enter(entry)

    # ---- state for operators

    @property
    def died(self) -> WorkerDied | None:
        """Return the reason why no engine can be started any more, or None."""
        return self._supervisor.died

    @property
    def num_deaths(self) -> int:
        return self._supervisor.num_deaths

    @property
    def is_up(self) -> bool:
        """Whether the engine process has reported ready and is running."""
        return self._supervisor.is_up

    @property
    def engine_pid(self) -> int | None:
        link = self._supervisor.link
        return link.process.process.pid if link is not None else None

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has work and has made no progress for longer than its steps can explain."""
        link = self._supervisor.link
        return link is not None and link.is_stuck

    async def wait_until_gone(self) -> None:
        """Wait until no engine can be started any more (see `died`), or until after `shutdown`."""
        await self._supervisor.wait_until_gone()

    # ---- what the supervisor calls

    def on_ready(self) -> None:
        """Replay all running requests to an engine that has become ready, suspects one at a time.

        Not those that have begun with other weights.
        """
        self._calls = Calls(self._send, {})
        for entry in [one for one in self._journal if not self.can_run(one)]:
            self._journal.close(entry.request.key)
            entry.entered_process = 0
            self.on_stranded(entry)
        for entry in self._suspects.begin(self._supervisor.process_number):
            self._enter(entry)
        self._send_next()
        self.on_change()

    def on_message(self, message: wire.FromEngine) -> None:
        match message:
            case wire.StepOutputs(outputs, step_tokens, stats):
                self._note_steps(step_tokens, stats)
                if stats is None:
                    self._num_unreported += sum(len(one.token_ids) for one in outputs.values())
                if self.on_events is not None:
                    for one in outputs.values():
                        self.on_events(one.events)
                for client_index, new in self._journal.record(outputs, sum(step_tokens)).items():
                    self.sinks.put(client_index, new)
                if self._suspects.is_probing:
                    self._send_next()
            case wire.CacheChanges(stored, removed):
                self.prefixes.change(self.number, stored, removed)
            case wire.IdleReport(stats, num_handled):
                self._stats, self._num_unreported = stats, 0
                self._note_idle(num_handled)
            case wire.RequestRefused(key, text, status):
                entry = self._journal.get(key)
                if entry is not None:
                    self._end_entry(entry, text, status)
                self._send_next()
            case wire.Reply():
                self._calls.take(message)
            case wire.Ready() | wire.StartFailed():
                raise AssertionError(f"the supervisor's: {message}")

    def on_lost(self) -> None:
        loras = [entry.request.lora for entry in self._journal]
        last = self._stats
        ended = [last.counters(), *([] if self._of_ended is None else [self._of_ended])]
        self._of_ended = wire.EngineStats.sum_of(ended)
        self._stats = wire.EngineStats(
            num_blocks=last.num_blocks,
            num_free_blocks=last.num_blocks,
            num_states=last.num_states,
            num_free_states=last.num_states,
            num_free_host_blocks=last.num_free_host_blocks,
            waiting_adapters=tuple(sorted({lora.name for lora in loras if lora is not None})),
            at_s=last.at_s,
        )
        self._takes_loads.clear()
        self._is_draining = False
        self._calls.end(_NO_ENGINE)
        self.prefixes.clear(self.number)
        self.costs.forget(self.number)
        self._of_ended.generation_tokens += self._num_unreported  # clients have them
        self._num_unmeasured = self._num_unreported = 0
        self._measured = wire.EngineStats()
        for entry in self._journal:
            entry.num_cached = 0

    def on_death(self, flight: FlightRecord, killed_from_outside: bool) -> bool:
        rejected = self._suspects.assign_blame(flight, killed_from_outside)
        for entry in rejected:
            message = "this request crashed the engine process repeatedly"
            self.sinks.put(entry.request.client_index, error_outputs(entry.request, message, live=entry.live))
        for entry in self._journal:  # from now on, another engine may have them
            entry.entered_process = 0
        self.on_change()
        return bool(rejected)

    def on_give_up(self, error: WorkerDied) -> None:
        self._stats = wire.EngineStats(at_s=self._stats.at_s)  # there are no blocks any more
        self._calls.end(error)
        self._takes_loads.set()  # so that calls that wait for it see that the engine has died
        self.on_gone(error)

    # ---- one engine

    def _enter(self, entry: JournalEntry) -> None:
        """Send a request to the engine. If that fails, finish only this request, with an error."""
        self._suspects.sent(entry)
        entry.weights = entry.needs_weights or self.weights
        request = entry.request
        try:
            frames = self._codec.encode_request(self._journal.replay(entry))
            if self._supervisor.link is not None:
                self._supervisor.link.send_bytes(*frames)
        except (UnicodeEncodeError, OverflowError) as error:
            self._end_entry(entry, f"the request cannot be encoded: {error}", RequestStatus.FINISHED_IGNORED)
        except Exception as error:
            logger.exception("request %s could not be sent to the engine", shown_id(entry.request.request_id))
            self._end_entry(entry, f"the request could not be sent to the engine: {type(error).__name__}: {error}")
        else:
            for sequence in set(range(request.num_seqs)) - entry.live:
                self._calls.post("finish_sequence", request.key, sequence, RequestStatus.FINISHED_STOPPED)

    def _end_entry(
        self, entry: JournalEntry, message: str, status: RequestStatus = RequestStatus.FINISHED_ERROR
    ) -> None:
        """Finish a request with an error that the engine does not have."""
        self._journal.close(entry.request.key)
        self.sinks.put(entry.request.client_index, error_outputs(entry.request, message, status, entry.live))

    def _note_idle(self, num_handled: int) -> None:
        link = self._supervisor.link
        assert link is not None
        link.note_idle(num_handled)
        if link.is_idle:
            self._end_lost_entries()
            self._send_next()
            self.on_change()

    def _end_lost_entries(self) -> None:
        """Finish requests with an error that an idle engine has lost: their clients would wait forever."""
        for entry in list(self._journal):
            if entry.entered_process == self._supervisor.process_number:
                logger.error("request %s: the engine is idle and does not have it", shown_id(entry.request.request_id))
                self._end_entry(entry, "the engine has lost this request")

    def _send_next(self) -> None:
        """Send the next suspect to the engine if the last one has been cleared or has ended, and what waited for it."""
        was_probing = self._suspects.is_probing
        while self.is_up and (entries := self._suspects.next()):
            for entry in entries:
                self._enter(entry)
        if was_probing and not self._suspects.is_probing:
            self.on_change()
        # A load that kills an engine must not look like a suspect.
        if self.is_up and not self._suspects.is_probing and not self._takes_loads.is_set():
            last = list(self._loaded.values())[-self._num_kept :]
            self._loads_again = [asyncio.create_task(self._load_again(lora)) for lora in last]
            self._takes_loads.set()

    async def _load_again(self, lora: LoraRef) -> None:
        """Load an adapter into the next engine, too, if it is still wanted; forget it if that fails."""
        try:
            if self._loaded.get(lora.digest) is lora:
                await self._calls.call("load_adapter", lora)
        except (RequestError, WorkerDied):
            if self._loaded.get(lora.digest) is lora:
                del self._loaded[lora.digest]

    def _note_steps(self, step_tokens: tuple[int, ...], stats: wire.EngineStats | None) -> None:
        self._suspects.note_computed(sum(step_tokens))
        self._num_unmeasured += sum(step_tokens)
        for count in step_tokens:
            self.on_step(count)
        if stats is not None:
            # Not since a report of an idle engine: what its steps computed may come with this one.
            num_steps, seconds = stats.num_steps - self._measured.num_steps, stats.step_s - self._measured.step_s
            self.costs.observe(self.number, num_steps, self._num_unmeasured, seconds)
            self._num_unmeasured = self._num_unreported = 0
            self._stats = self._measured = stats

    def _send(self, message: wire.Call | wire.Reply) -> None:
        """Send a message that is not a request, if an engine is up; a failure is logged."""
        if self._supervisor.link is not None:
            self._supervisor.link.send(message)
