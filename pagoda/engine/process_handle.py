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

from pagoda.base.config import EngineConfig
from pagoda.engine.flight_recorder import FlightRecorder

# More than any scheduler has rows. If it were fewer, a suspect would be missed, and nothing else.
RECORDER_ROWS = 65536


class RendezvousDir:
    """The folder with what both processes share, until both have opened it. Only their user may enter."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/engine"
        self.recorder = Path(folder, "flight")

    def remove(self) -> None:
        """Remove it from the disk; what is open stays usable. Idempotent, from either process."""
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
        self.process = subprocess.Popen([sys.executable, "-m", module, self.place.folder], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        data = msgspec.msgpack.encode(config, enc_hook=str)
        self.process.stdin.write(len(data).to_bytes(8, "little") + data)
        self.process.stdin.flush()  # left open: the engine exits when it is closed

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process (by itself within `grace_s`, else by kill) and free what it had; return its exit code."""
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
