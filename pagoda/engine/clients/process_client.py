"""ProcessClient: run an engine core in a child process, and restart it if it dies, without losing a request.

It starts the process, sends it requests, and records every token in the Journal before a client gets it. When the
process ends or hangs, it starts another one and replays the running requests, those that may have killed it one at a
time (suspects.py). If no engine can be started any more, every caller gets WorkerDied.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.base.out_of_memory import describe_exit
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.adapter_calls import AdapterCalls
from pagoda.engine.clients.engine_link import EngineLink
from pagoda.engine.clients.journal import Journal, JournalEntry, error_outputs
from pagoda.engine.clients.process_handle import EngineProcess
from pagoda.engine.clients.suspects import Suspects

logger = logging.getLogger("pagoda.engine")

MAX_FAILED_STARTS = 3
START_PAUSE_S = 0.5  # after a failed start, whose cause may need a moment to go away


@dataclass(frozen=True, slots=True)
class _ProcessEnd:
    """How an engine process ended."""

    was_ready: bool
    was_hung: bool


class ProcessClient:
    """An EngineCoreClient over a child process (ZeroMQ, msgpack).

    step_timeout_s: a step that runs longer counts as a death, and so does an engine that has work and begins no step.
    module: what the child process runs.
    """

    def __init__(
        self, config: EngineConfig, step_timeout_s: float = 120.0, module: str = "pagoda.engine_process"
    ) -> None:
        self._config = config
        self._module = module
        self._step_timeout_s = step_timeout_s
        self._journal = Journal()
        self._codec = wire.Codec(wire.FromEngine)
        self._link: EngineLink | None = None  # to an engine that has been ready
        self._process_number = 0
        self._outputs: asyncio.Queue[EngineCoreOutputs | WorkerDied] = asyncio.Queue()
        self._suspects = Suspects(self._journal)
        self._adapters = AdapterCalls(self._send)
        self._stats = wire.EngineStats()
        self._resets: dict[int, asyncio.Future[bool]] = {}
        self._next_call = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._unclosed: EngineProcess | None = None  # what a cancelled supervisor leaves
        self._facts: asyncio.Future[wire.EngineFacts] | None = None
        self._start_error: str | None = None  # the last engine process's error message if it could not start
        self.died: WorkerDied | None = None
        """Set once no engine can be started any more."""
        self.num_deaths = 0
        self.on_step: Callable[[int], object] = lambda _: None
        """Called with the number of tokens of each step."""

    # ---- what AsyncEngine calls

    async def start(self) -> wire.EngineFacts:
        """Start the engine; return its facts once it is ready.

        Raises ConfigError for settings that cannot work, WorkerDied for an engine that does not start.
        """
        self._context = zmq.asyncio.Context()
        self._facts = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._run_supervisor())
        return await asyncio.shield(self._facts)

    def add_request(self, request: Request) -> None:
        if self.died is not None:
            self._outputs.put_nowait(self.died)
            return
        entry = self._journal.open(request)
        if self.is_up:
            self._enter(entry)

    def abort(self, request_ids: list[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._journal]
        gone = [i for request_id in known for i in self._journal.engine_ids(request_id)]
        for request_id in known:
            self._journal.close(request_id)
        if gone:
            self._send(wire.AbortRequests(tuple(gone)))
        self._probe_next()

    def finish_sequence(self, request_id: str, sequence: int, status: RequestStatus) -> None:
        engine_id, engine_sequence = self._journal.engine_sequence(request_id, sequence)
        self._journal.end_sequence(request_id, sequence)
        self._send(wire.FinishSequence(engine_id, engine_sequence, status))
        self._probe_next()

    async def next_outputs(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, WorkerDied):
            raise item
        return item

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Return False if blocks are in use. Return True while the engine is down: its cache is gone."""
        if self.died is not None:
            raise self.died
        if not self.is_up:
            return True
        self._next_call += 1
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets[self._next_call] = reply
        self._send(wire.ResetPrefixCache(self._next_call, preempt_running))
        return await reply

    async def load_adapter(self, lora: LoraRef) -> None:
        if self.died is not None:
            raise self.died
        await self._adapters.load(lora)

    def unload_adapter(self, lora: LoraRef) -> None:
        self._adapters.unload(lora)

    def stats(self) -> wire.EngineStats:
        return self._stats

    async def wait_until_gone(self) -> None:
        """Wait until the supervisor has given up (see `died`) or has been shut down."""
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})

    async def shutdown(self) -> None:
        """End the engine process; running requests are dropped. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
            if self._unclosed is not None:
                await asyncio.to_thread(self._unclosed.close, 5.0)
            self._unclosed = self._link = None
            self._context.term()

    # ---- state for operators

    @property
    def is_up(self) -> bool:
        """Whether the engine process has reported ready and is running."""
        return self._link is not None and self._link.is_up

    @property
    def engine_pid(self) -> int | None:
        return self._link.process.process.pid if self._link is not None else None

    def stuck_for_s(self) -> float:
        """Seconds since the engine made progress, or 0 while it has no work."""
        return self._link.stuck_for_s() if self._link is not None else 0.0

    # ---- supervision

    async def _run_supervisor(self) -> None:
        """Keep an engine process running; if that becomes impossible, fail every caller."""
        try:
            await self._supervise()
        except ConfigError as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("the supervisor of the engine process failed")
            self._give_up(WorkerDied(f"internal error in the server: {type(error).__name__}: {error}"))

    async def _supervise(self) -> None:
        """Run one engine process after another, until too many starts fail. Raises ConfigError for invalid settings."""
        failed_starts = 0
        while True:
            self._process_number += 1
            self._start_error = None
            engine = EngineProcess(self._config, self._module, self._context)
            try:
                end = await self._run_until_death(engine)
            except asyncio.CancelledError:
                self._unclosed = engine
                raise
            except Exception:
                self._link = None
                await asyncio.to_thread(engine.close)
                raise
            self._link = None
            self._stats = msgspec.structs.replace(
                self._stats, num_running=0, num_swapped=0, kv_usage=0.0, num_waiting=len(self._journal)
            )
            flight = engine.recorder.read()
            code = await asyncio.to_thread(engine.close)
            self.num_deaths += 1
            self._settle_resets()
            self._adapters.end()
            failed_starts = 0 if end.was_ready else failed_starts + 1
            if failed_starts >= MAX_FAILED_STARTS:
                return self._give_up(WorkerDied(_failed_start(failed_starts, code, self._start_error)))
            logger.error("engine process %d %s; starting another", engine.process.pid, describe_exit(code))
            if end.was_ready:
                killed_from_outside = code == -signal.SIGKILL and not end.was_hung
                for entry in self._suspects.assign_blame(flight, self._process_number, killed_from_outside):
                    said = "this request crashed the engine process repeatedly"
                    self._outputs.put_nowait(error_outputs(entry, said))
            else:
                await asyncio.sleep(START_PAUSE_S * failed_starts)

    async def _run_until_death(self, engine: EngineProcess) -> _ProcessEnd:
        """Handle the messages of an engine process until it dies or hangs. Raises ConfigError for invalid settings."""
        link = EngineLink(engine, self._codec, self._step_timeout_s)
        was_ready = False
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, wire.Ready):
                    was_ready = True
                    self._begin(link, message.facts)
                else:
                    self._handle(message)
            return _ProcessEnd(was_ready, link.was_hung)
        finally:
            link.close()

    def _begin(self, link: EngineLink, facts: wire.EngineFacts) -> None:
        """Replay all running requests to an engine that has become ready, suspects one at a time."""
        self._link = link
        link.open()
        assert self._facts is not None
        if not self._facts.done():
            self._facts.set_result(facts)
        self._adapters.begin()
        self._journal.forget_aliases()
        for entry in self._suspects.set_apart():
            self._enter(entry)
        self._probe_next()

    def _give_up(self, error: ConfigError | WorkerDied) -> None:
        assert self._facts is not None
        self.died = error if isinstance(error, WorkerDied) else WorkerDied(str(error))
        if self._facts.done():
            logger.error("the engine cannot be restarted: %s", error)
        else:
            self._facts.set_exception(error)
        self._settle_resets()
        self._adapters.give_up(self.died)
        self._outputs.put_nowait(self.died)

    def _settle_resets(self) -> None:
        """Complete the cache resets that were sent to a dead engine: its prefix cache is gone."""
        for reply in self._resets.values():
            if not reply.done():
                reply.set_result(True)
        self._resets.clear()

    # ---- one engine

    def _enter(self, entry: JournalEntry) -> None:
        """Send a request to the engine. If that fails, finish only this request, with an error."""
        is_new = entry.entered_process == 0
        entry.entered_process = self._process_number
        entry.num_since_entry = 0
        try:
            requests = [entry.request] if is_new else self._journal.replay(entry)
            for data in [self._codec.encode_request(request) for request in requests]:
                if self._link is not None:
                    self._link.send_bytes(data)
        except (UnicodeEncodeError, OverflowError) as error:
            self._end_entry(entry, f"the request cannot be encoded: {error}", RequestStatus.FINISHED_IGNORED)
        except Exception as error:
            logger.exception("request %s could not be sent to the engine", entry.request.request_id)
            self._end_entry(entry, f"the request could not be sent to the engine: {type(error).__name__}: {error}")

    def _end_entry(
        self, entry: JournalEntry, message: str, status: RequestStatus = RequestStatus.FINISHED_ERROR
    ) -> None:
        """Finish a request with an error, and abort the parts of it that were sent to the engine."""
        request_id = entry.request.request_id
        parts = self._journal.engine_ids(request_id) if entry.aliases else []
        self._journal.close(request_id)
        self._outputs.put_nowait(error_outputs(entry, message, status))
        if parts:
            self._send(wire.AbortRequests(tuple(parts)))

    def _end_lost_entries(self) -> None:
        """Finish requests with an error that an idle engine has lost: their clients would wait forever."""
        for entry in list(self._journal):
            if entry.entered_process == self._process_number:
                logger.error("request %s: the engine is idle and does not have it", entry.request.request_id)
                self._end_entry(entry, "the engine has lost this request")

    def _probe_next(self) -> None:
        """Send the next suspect to the engine, if the last one has cleared itself or ended."""
        while self.is_up and (entry := self._suspects.next()) is not None:
            self._enter(entry)

    def _note_steps(self, step_tokens: tuple[int, ...], stats: wire.EngineStats | None) -> None:
        for count in step_tokens:
            self.on_step(count)
        if stats is not None:
            self._stats = stats

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.StepOutputs(outputs, step_tokens, stats):
                self._note_steps(step_tokens, stats)
                self._outputs.put_nowait(self._journal.record(outputs))
                if self._suspects.is_probing:
                    self._probe_next()
            case wire.StepReport(step_tokens, stats):
                self._note_steps(step_tokens, stats)
            case wire.IdleReport(stats, num_handled):
                self._stats = stats
                assert self._link is not None
                self._link.note_idle(num_handled)
                if self._link.is_idle:
                    self._end_lost_entries()
                    self._probe_next()
            case wire.RequestRefused(_, handle, text, status):
                entry = self._journal.by_handle(handle)
                if entry is not None:
                    self._end_entry(entry, text, status)
                self._probe_next()
            case wire.ResetReply(call_id, succeeded):
                reply = self._resets.pop(call_id, None)
                if reply is not None and not reply.done():  # the caller may have been cancelled
                    reply.set_result(succeeded)
            case wire.AdapterReply():
                self._adapters.on_reply(message)
            case wire.StartFailed(text, config):
                if config:
                    raise ConfigError(text)
                self._start_error = text
                logger.error("the engine could not start: %s", text)
            case wire.Ready():
                raise AssertionError("an engine sent Ready twice")

    def _send(self, message: wire.ToEngine) -> None:
        """Send a message that is not a request, if an engine is up; a failure is logged."""
        if self._link is not None:
            self._link.send(message)


def _failed_start(times: int, code: int | None, said: str | None) -> str:
    """Return the error message for an engine that cannot be started: how it ended, its own error, and a remedy."""
    message = f"the engine process {describe_exit(code)} while loading, {times} times in a row"
    if said is not None:
        return f"{message}: {said}"
    if code in (-signal.SIGKILL, -signal.SIGABRT):
        return (
            f"{message}; probably memory ran out: lower kv_cache_memory or max_model_len, quantize, "
            "or raise the memory limit (cgroup, ulimit)"
        )
    return message
