"""Supervisor: keep one engine process running. It starts a process, notices its end, and starts the next one."""

import asyncio
import itertools
import logging
import signal
from typing import Protocol

import zmq.asyncio

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.engine import wire
from pagoda.engine.clients.engine_link import GRACE_S, EngineLink, EngineProcess
from pagoda.engine.flight_recorder import FlightRecord
from pagoda.process.out_of_memory import describe_exit, hint_of_exit, num_oom_kills

logger = logging.getLogger("pagoda.engine")

MAX_FIRST_STARTS = 3  # of a server that has never been ready: its settings are probably wrong
MAX_FRUITLESS = 10  # engines in a row, once one has been ready: about two minutes of pauses
STABLE_S = 300.0  # an engine that was ready for so long is not part of a loop of crashes
MAX_FAILED_SPAWNS = 7  # processes that the system refused to start: about half a minute of pauses
START_PAUSE_S = 0.5  # after the first failure, whose cause may need a moment to go away; then twice as long each time
MAX_PAUSE_S = 30.0


class Restarts:
    """Decides about processes that end: whether to start another, and after which pause."""

    def __init__(self) -> None:
        self.num_fruitless = 0
        """How many in a row were of no use."""

    def pause_s(self, is_fruitless: bool, has_been_ready: bool) -> float | None:
        """Return how long to wait before the next start; None if it is of no use.

        has_been_ready: one has been, so that the settings work, and what keeps the next one may pass.
        """
        self.num_fruitless = self.num_fruitless + 1 if is_fruitless else 0
        if self.num_fruitless >= (MAX_FRUITLESS if has_been_ready else MAX_FIRST_STARTS):
            return None
        return min(START_PAUSE_S * 2 ** (self.num_fruitless - 1), MAX_PAUSE_S) if self.num_fruitless else 0.0


class Supervised(Protocol):
    """The user of the engine processes. Everything is called in the event loop."""

    def on_ready(self) -> None:
        """An engine is ready for messages."""
        ...

    def on_message(self, message: wire.FromEngine) -> None: ...

    def on_lost(self) -> None:
        """The engine has died or hangs; nothing can be sent any more."""
        ...

    def on_death(self, flight: FlightRecord, killed_from_outside: bool) -> bool:
        """The process of an engine that had been ready has ended. Return whether a rejected request explains it.

        flight: the requests in its last steps.
        """
        ...

    def on_give_up(self, error: WorkerDied) -> None:
        """No engine can be started any more."""
        ...


class Supervisor:
    """Runs one engine process after another, until too many in a row are fruitless.

    An engine is fruitless if it does not become ready, or ends within STABLE_S without any output, and no request
    explains that. All others have moved requests on, so that even a server whose engines die all the time ends them.

    link: to an engine that is ready, or None.   process_number: of the current engine process, from 1.
    weights: of the last engine that was ready, as a digest.
    refusal: why an engine could not start with the weights of the last `restart`, None if it could.
    """

    def __init__(
        self, config: EngineConfig, module: str, step_timeout_s: float, user: Supervised, number: int = 0
    ) -> None:
        """module: what the child process runs.   step_timeout_s: see EngineLink.   number: of the engine."""
        self._config = config
        self._number = number
        self._module = module
        self._step_timeout_s = step_timeout_s
        self._user = user
        self._codec = wire.Codec(wire.FromEngine)
        self._task: asyncio.Task[None] | None = None
        self._unclosed: EngineProcess | None = None  # what a cancelled task leaves
        self._sizes: asyncio.Future[wire.EngineSizes] | None = None
        self._start_error: str | None = None  # the last engine process's error message if it could not start
        self.link: EngineLink | None = None
        self.process_number = 0
        self.num_deaths = 0
        self.weights = ""
        self.refusal: str | None = None
        self._before = config  # the settings of the last engine that was ready
        self.died: WorkerDied | None = None
        """Set once no engine can be started any more."""

    async def start(self) -> wire.EngineSizes:
        """Start the first engine, or the first one after `shutdown`; return its sizes once it is ready.

        Raises ConfigError for settings that cannot work, WorkerDied for an engine that does not start.
        """
        self.died = None
        self._context = zmq.asyncio.Context()
        self._sizes = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._sizes)

    @property
    def is_up(self) -> bool:
        """Whether the engine process has reported ready and is running."""
        return self.link is not None and self.link.is_up

    def restart(self, source: wire.WeightsSource | None = None) -> None:
        """End the engine process, if it is ready: the next one starts at once, and no request is to blame.

        source: of its weights. If it cannot start with them, the one after it has those of before: see `refusal`.
        """
        if self.link is not None:
            self.refusal = None
            if source is not None:
                self._config = source.of(self._config)
            self.link.end()

    async def wait_until_gone(self) -> None:
        """Wait until this has given up (see `died`) or has been shut down."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def shutdown(self) -> None:
        """End the engine process. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            if self._unclosed is not None:
                await asyncio.to_thread(self._unclosed.close, GRACE_S)
            self._unclosed = self.link = None
            self._context.term()

    async def _run(self) -> None:
        """Keep an engine process running; if that becomes impossible, give up."""
        try:
            await self._supervise()
        except (ConfigError, WorkerDied) as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("the supervisor of the engine process failed")
            self._give_up(WorkerDied(f"internal error in the server: {type(error).__name__}: {error}"))

    async def _supervise(self) -> None:
        """Run one engine process after another, until too many are fruitless. Raises ConfigError for wrong settings."""
        restarts = Restarts()
        while True:
            self.process_number += 1
            self._start_error = None
            num_oom_kills_before = num_oom_kills()
            engine = await self._spawn()
            try:
                link = await self._run_until_death(engine)
            except asyncio.CancelledError:
                self._unclosed = engine
                raise
            except Exception:
                self.link = None
                await asyncio.to_thread(engine.close)
                raise
            ready_s, self.link = link.ready_s(), None
            self._user.on_lost()
            flight = engine.recorder.read()
            code = await asyncio.to_thread(engine.close)
            self.num_deaths += 1
            is_fruitless = ready_s is None or (ready_s < STABLE_S and not link.had_output and not link.was_ended)
            if ready_s is not None:
                # Linux kills a process with SIGKILL, too, when memory runs out: then a request may be the cause.
                ran_out_of_memory = num_oom_kills() > num_oom_kills_before
                was_killed = code == -signal.SIGKILL and not link.was_hung and not ran_out_of_memory
                is_outside = was_killed or link.was_stopped or link.was_ended
                has_explanation = self._user.on_death(flight, killed_from_outside=is_outside)
                is_fruitless = is_fruitless and not has_explanation
            elif self._has_been_ready and self._config != self._before:
                self.refusal = self._start_error or f"the engine process {describe_exit(code)}"
                self._config = self._before
            pause_s = restarts.pause_s(is_fruitless, self._has_been_ready)
            if pause_s is None:
                return self._give_up(WorkerDied(self._last_word(restarts.num_fruitless, code, ready_s)))
            logger.error(
                "engine process %d %s; starting another%s",
                engine.process.pid,
                describe_exit(code),
                f" in {pause_s:.1f} s" if pause_s else "",
            )
            await asyncio.sleep(pause_s)

    async def _spawn(self) -> EngineProcess:
        """Start a process; try again if the system refuses, as it does when memory or processes run short."""
        for num_failed in itertools.count(1):
            try:
                return EngineProcess(self._config, self._module, self._context, self._number)
            except OSError as error:
                if num_failed == MAX_FAILED_SPAWNS:
                    raise WorkerDied(f"no engine process could be started, {num_failed} times: {error}") from error
                pause_s = START_PAUSE_S * 2 ** (num_failed - 1)
                logger.error("an engine process could not be started: %s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
        raise AssertionError

    async def _run_until_death(self, engine: EngineProcess) -> EngineLink:
        """Handle the messages of an engine process until it dies or hangs; return the link that it had.

        Raises ConfigError for invalid settings.
        """
        link = EngineLink(engine, self._codec, self._step_timeout_s)
        try:
            while (message := await link.receive()) is not None:
                match message:
                    case wire.Ready(sizes):
                        self._begin(link, sizes)
                    case wire.StartFailed(text, config):
                        if config and not self._has_been_ready:
                            raise ConfigError(text)
                        self._start_error = text
                        logger.error("the engine could not start: %s", text)
                    case _:
                        link.had_output |= isinstance(message, wire.StepOutputs) and bool(message.outputs)
                        self._user.on_message(message)
            return link
        finally:
            link.close()

    @property
    def _has_been_ready(self) -> bool:
        """Whether an engine with these settings has been ready: they work, and what keeps the next one may pass."""
        assert self._sizes is not None
        return self._sizes.done()

    def _begin(self, link: EngineLink, sizes: wire.EngineSizes) -> None:
        assert self.link is not link, "an engine sent Ready twice"
        self.link = link
        link.open()
        assert self._sizes is not None
        if not self._sizes.done():
            self._config = sizes.settle(self._config)
            self._sizes.set_result(sizes)
        self._before, self.weights = self._config, sizes.weights
        self._user.on_ready()

    def _give_up(self, error: ConfigError | WorkerDied) -> None:
        assert self._sizes is not None
        self.died = error if isinstance(error, WorkerDied) else WorkerDied(str(error))
        if self._sizes.done():
            logger.error("the engine cannot be restarted: %s", error)
        else:
            self._sizes.set_exception(error)
        self._user.on_give_up(self.died)

    def _last_word(self, times: int, code: int | None, ready_s: float | None) -> str:
        """Return the error message for engines that are of no use: how the last one ended, its own error, a remedy."""
        if ready_s is not None:
            return (
                f"the engine process {describe_exit(code)} {ready_s:.0f} s after it was ready, the last of {times} "
                "in a row without any output, and no request explains it: find the cause in the log above (memory, "
                "a driver, a process that kills it), then start the server again"
            )
        message = f"the engine process {describe_exit(code)} while loading, {times} times in a row"
        if self._start_error is not None:
            return f"{message}: {self._start_error}"
        return message + hint_of_exit(code)
