"""EngineLink: one engine process, the messages to and from it, and whether it makes progress."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from pagoda.base.child_signals import signals_blocked
from pagoda.base.config import EngineConfig
from pagoda.engine import wire
from pagoda.engine.flight_recorder import FlightRecorder

logger = logging.getLogger("pagoda.engine")

WATCH_INTERVAL_S = 0.1
FINAL_MESSAGES_S = 0.05  # a dead engine's last messages may still be on their way
COMPUTING_SHARE = 0.1  # of a core: an engine that uses this much makes progress, though its step may take long
COMPUTING_TIMEOUTS = 10  # as many step timeouts may a step take that uses the processor

# More rows than any scheduler has. Too few would only mean missing suspects after a crash.
RECORDER_ROWS = 65536


class RendezvousDir:
    """The folder of the socket and the recorder, until both processes have opened them. Only their user has access."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/engine"
        self.recorder = Path(folder, "flight")

    def remove(self) -> None:
        """Delete the folder; open files and sockets stay usable. Idempotent, from either process."""
        with contextlib.suppress(OSError):
            for path in (self.recorder, Path(self.folder, "engine")):
                path.unlink(missing_ok=True)
            os.rmdir(self.folder)


class EngineProcess:
    """One engine process, its socket and its flight recorder."""

    def __init__(self, config: EngineConfig, module: str, context: zmq.asyncio.Context) -> None:
        """Raises OSError if no process can be started, for lack of memory, say."""
        self.place = RendezvousDir(tempfile.mkdtemp(prefix="pagoda-"))
        self.recorder = FlightRecorder(self.place.recorder, RECORDER_ROWS, create=True)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the journal, which admission bounds
        try:
            self.socket.bind(self.place.address)
            with signals_blocked(signal.SIGINT, signal.SIGTERM):  # the parent handles them
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, self.place.folder], stdin=subprocess.PIPE
                )
        except OSError:
            self._release()
            raise
        assert self.process.stdin is not None
        data = msgspec.msgpack.encode(config, enc_hook=str)
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which is found out later
            self.process.stdin.write(len(data).to_bytes(8, "little") + data)
            self.process.stdin.flush()  # left open: the engine exits when it is closed

    def cpu_s(self) -> float:
        """Return the seconds of processor time that the process has used; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, killing it after `grace_s`; free its socket and recorder; return its exit code."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._release()
        return self.process.returncode

    def _release(self) -> None:
        self.socket.close()
        self.recorder.close()
        self.place.remove()


class EngineLink:
    """The connection to one engine process.

    It ends when the process does, and when the process hangs: it has work, and for `step_timeout_s` neither begins nor
    ends a step nor uses the processor. (A large model's step of thousands of tokens takes minutes on few cores. One
    that uses the processor for COMPUTING_TIMEOUTS times as long hangs, too.) `was_hung` then tells which.
    """

    def __init__(self, process: EngineProcess, codec: wire.Codec, step_timeout_s: float) -> None:
        self.process = process
        self.was_hung = False
        self._codec = codec
        self._step_timeout_s = step_timeout_s
        self._is_open = False
        self._progress_at_s = time.monotonic()
        self._num_sent = 0
        self._num_handled_when_idle = 0
        self._watch = asyncio.create_task(self._wait_for_end())

    def open(self) -> None:
        """Send messages from now on: the engine is ready."""
        self._is_open = True
        self.process.place.remove()  # both processes have its files open, so nothing stays on disk if one is killed

    def close(self) -> None:
        """Stop watching the process. Idempotent."""
        self._watch.cancel()

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

    def send(self, message: wire.ToEngine) -> None:
        """Send a message that is not a request; a failure is logged."""
        try:
            self.send_bytes(self._codec.encode(message))
        except Exception:
            logger.exception("a message could not be sent to the engine: %r", message)

    def send_bytes(self, data: bytes) -> None:
        """Queue an encoded message in ZeroMQ. What a dead engine did not receive is replayed to the next one."""
        sent: asyncio.Future[object] = self.process.socket.send(data)  # type: ignore[assignment]
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
        """Whether the process is running."""
        return self.process.process.poll() is None

    def stuck_for_s(self) -> float:
        """Seconds since the engine made progress, or 0 while it has no work."""
        return time.monotonic() - self._progress_at_s

    async def _wait_for_end(self) -> bool:
        """Wait until the process has ended (return False), or has work but makes no progress (return True)."""
        steps_seen, was_late = (0, 0), False
        step_at_s, cpu_s = self._progress_at_s, 0.0  # when a step began or ended; processor time used at _progress_at_s
        while self.is_up:
            flight = self.process.recorder.read()
            steps = (flight.steps_begun, flight.steps_ended)
            has_work = self._is_open and not self.is_idle
            now_s, cpu_now_s = time.monotonic(), self.process.cpu_s()
            is_computing = cpu_now_s - cpu_s >= COMPUTING_SHARE * (now_s - self._progress_at_s)
            if steps != steps_seen or not has_work:
                step_at_s = now_s
            if step_at_s == now_s or (is_computing and now_s - step_at_s < COMPUTING_TIMEOUTS * self._step_timeout_s):
                self._progress_at_s, cpu_s, was_late = now_s, cpu_now_s, False
            elif (stuck_s := self.stuck_for_s()) > self._step_timeout_s:
                # Check twice: if this process was the slow one, it reads the engine's pending messages in between.
                if was_late:
                    logger.error("no progress for %.1f s: treating the engine as hung", stuck_s)
                    return True
                was_late = True
            steps_seen = steps
            await asyncio.sleep(WATCH_INTERVAL_S)
        return False


def _log_failure(sent: "asyncio.Future[object]") -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        logger.error("a message did not reach the engine: %r", error)
