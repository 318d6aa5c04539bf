"""EngineLink: one engine process, the messages to and from it, and whether it makes progress."""

import asyncio
import logging
import math
import time

import msgspec
import zmq
import zmq.asyncio

from pagoda.base.config import EngineConfig
from pagoda.base.config_fit import pipeline_depth
from pagoda.engine import wire
from pagoda.engine.flight_recorder import FlightRecorder
from pagoda.process.child_process import RendezvousDir, children_of, cpu_s_of, end_child, is_stopped, start_child
from pagoda.process.watchdog import SLOW_STEPS, Watchdog

logger = logging.getLogger("pagoda.engine")

WATCH_INTERVAL_S = 0.1
STUCK_AFTER_S = 30.0  # without progress an engine is reported as stuck, before it counts as hung
GRACE_S = 5.0  # which an engine has to end: it may still write KV blocks to a tier
FINAL_MESSAGES_S = 0.05  # a dead engine's last messages may still be on their way

# More rows than any scheduler has. Too few would only mean missing suspects after a crash.
_RECORDER_ROWS = 65536

SOCKET = "engine"  # in the rendezvous folder


def open_recorder(place: RendezvousDir, config: EngineConfig, create: bool = False) -> FlightRecorder:
    """Return the flight recorder in a rendezvous folder.   create: make its file."""
    num_slots = max(pipeline_depth(config), 2)  # whether steps are scheduled ahead may not be known yet
    num_stages = config.parallel.pipeline_parallel_size
    return FlightRecorder(place.path("flight"), _RECORDER_ROWS, num_slots, num_stages, create)


class EngineProcess:
    """One engine process, its socket and its flight recorder."""

    def __init__(self, config: EngineConfig, module: str, context: zmq.asyncio.Context, number: int = 0) -> None:
        """number: of the engine, from 0. Raises OSError if no process can be started, for lack of memory, say."""
        self.place = RendezvousDir()
        self.recorder = open_recorder(self.place, config, create=True)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the journal, which admission bounds
        try:
            self.socket.bind(self.place.address(SOCKET))
            self.process = start_child(
                module, [self.place.folder, str(number)], msgspec.msgpack.encode(config.without_keys(), enc_hook=str)
            )
        except OSError:
            self._release()
            raise
        self._ranks: list[int] = []
        self._is_on_ray = config.parallel.executor == "ray"

    def note_ranks(self) -> None:
        """Count the processor time of the processes that the engine has started as its own, from now on."""
        self._ranks = children_of(self.process.pid)

    def cpu_s(self) -> float:
        """Return the seconds of processor time that the engine has used; 0 where the system does not say.

        What ranks on other machines use is not seen: with them, it is the time.
        """
        if self._is_on_ray:
            return time.monotonic()
        return sum(map(cpu_s_of, (self.process.pid, *self._ranks)))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, or one that it has started: it is not at fault if it hangs."""
        return any(map(is_stopped, (self.process.pid, *self._ranks)))

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, killing it after `grace_s`; free its socket and recorder; return its exit code."""
        code = end_child(self.process, grace_s)
        self._release()
        return code

    def _release(self) -> None:
        self.socket.close()
        self.recorder.close()
        self.place.remove()


class EngineLink:
    """The connection to one engine process.

    It ends when the process does, and when the process hangs: it has work, and for `step_timeout_s` makes no progress
    (see Watchdog; 0: it never counts as hung). `was_hung` then tells which, and `was_stopped` whether a signal from
    outside had stopped it.
    was_ended: whether `end` has ended it.   had_output: whether it has sent any output of a request.
    """

    def __init__(self, process: EngineProcess, codec: wire.Codec, step_timeout_s: float) -> None:
        self.process = process
        self.was_hung = self.was_stopped = self.was_ended = self.had_output = False
        self._codec = codec
        self._step_timeout_s = step_timeout_s or math.inf
        self._ready_at_s: float | None = None
        self._watchdog = Watchdog(time.monotonic())
        self._num_sent = 0
        self._num_handled_when_idle = 0
        self._watch = asyncio.create_task(self._wait_for_end())

    def open(self) -> None:
        """Send messages from now on: the engine is ready."""
        self._ready_at_s = time.monotonic()
        self.process.note_ranks()
        self.process.place.remove()  # both processes have its files open, so nothing stays on disk if one is killed

    def ready_s(self) -> float | None:
        """Return for how many seconds the engine has been ready; None if it has not."""
        return time.monotonic() - self._ready_at_s if self._ready_at_s is not None else None

    def close(self) -> None:
        """Stop watching the process. Idempotent."""
        self._watch.cancel()

    def end(self) -> None:
        """End the process, and with it this."""
        self.was_ended = True
        asyncio.get_running_loop().run_in_executor(None, end_child, self.process.process, GRACE_S)

    async def receive(self) -> wire.FromEngine | None:
        """Return the next message; None once the process has ended or hangs."""
        receive = asyncio.ensure_future(self.process.socket.recv())
        await asyncio.wait({receive, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            await asyncio.wait({receive}, timeout=FINAL_MESSAGES_S)
        if not receive.done():
            receive.cancel()
            self.was_hung = self._watch.result()
            return None
        return self._codec.decode(receive.result())

    def send(self, message: wire.Call | wire.Reply) -> None:
        """Send a message that is not a request; a failure is logged."""
        try:
            self.send_bytes(self._codec.encode(message))
        except Exception:
            logger.exception("a message could not be sent to the engine: %r", message)

    def send_bytes(self, data: bytes | memoryview, *arrays: bytes | memoryview) -> None:
        """Queue an encoded message in ZeroMQ. What a dead engine did not receive is replayed to the next one.

        arrays: frames that follow it. They are not copied, and must not change.
        """
        socket = self.process.socket
        sending = socket.send_multipart([data, *arrays], copy=False) if arrays else socket.send(data)
        sent: asyncio.Future[object] = sending  # type: ignore[assignment]
        if sent.done():
            sent.result()
        else:
            sent.add_done_callback(_log_failure)
        self._num_sent += 1

    def note_idle(self, num_handled: int) -> None:
        """The engine reported that it had no work left after `num_handled` messages."""
        self._num_handled_when_idle = num_handled

    @property
    def is_idle(self) -> bool:
        """Whether the engine has handled every message sent to it and has no request left."""
        return self._num_handled_when_idle == self._num_sent

    @property
    def is_up(self) -> bool:
        """Whether the process was running when it was last looked at: each request asks this of each replica."""
        return not self._watch.done()

    def stuck_for_s(self) -> float:
        """Seconds since the engine made progress, or 0 while it has no work."""
        return time.monotonic() - self._watchdog.progress_at_s

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has work and has made no progress for longer than its steps can explain."""
        return self.stuck_for_s() > max(STUCK_AFTER_S, SLOW_STEPS * self._watchdog.longest_s)

    async def _wait_for_end(self) -> bool:
        """Wait until the process has ended (return False), or has work but makes no progress (return True)."""
        while self.process.process.poll() is None:
            flight = self.process.recorder.read()
            mark, has_work = (flight.steps_begun, flight.steps_ended), self._ready_at_s is not None and not self.is_idle
            if self._watchdog.is_hung(mark, has_work, self.process.cpu_s(), self._step_timeout_s, time.monotonic()):
                logger.error("no progress for %.1f s: treating the engine as hung", self.stuck_for_s())
                self.was_stopped = self.process.is_stopped
                return True
            await asyncio.sleep(WATCH_INTERVAL_S)
        return False


def _log_failure(sent: "asyncio.Future[object]") -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        logger.error("a message did not reach the engine: %r", error)
