"""EngineProcess: a running engine process, with its socket and its flight recorder."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from pagoda.base.child_signals import signals_blocked
from pagoda.base.config import EngineConfig
from pagoda.engine.flight_recorder import FlightRecorder

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
        self.place = RendezvousDir(tempfile.mkdtemp(prefix="pagoda-"))
        self.recorder = FlightRecorder(self.place.recorder, RECORDER_ROWS, create=True)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the journal, which admission bounds
        self.socket.bind(self.place.address)
        with signals_blocked(signal.SIGINT, signal.SIGTERM):  # the parent handles them
            self.process = subprocess.Popen([sys.executable, "-m", module, self.place.folder], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        data = msgspec.msgpack.encode(config, enc_hook=str)
        self.process.stdin.write(len(data).to_bytes(8, "little") + data)
        self.process.stdin.flush()  # left open: the engine exits when it is closed

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process, killing it after `grace_s`; free its socket and recorder; return its exit code."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.socket.close()
        self.recorder.close()
        self.place.remove()
        return self.process.returncode
