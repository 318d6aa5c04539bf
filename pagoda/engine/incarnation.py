"""Incarnation: one life of the engine process, with its socket and its flight recorder."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from pagoda.base.config import EngineConfig
from pagoda.engine.flight_recorder import FlightRecorder

# More than any scheduler's rows: the recorder notes requests, and only a suspicion hangs on a missing one.
RECORDER_ROWS = 65536


class ProcessOptions(msgspec.Struct, frozen=True):
    """What an engine process is told on its standard input, as msgpack."""

    config: EngineConfig
    socket: str
    recorder: str


class Incarnation:
    """One life of the engine process: the process, its socket and its flight recorder."""

    def __init__(
        self, config: EngineConfig, module: str, folder: Path, number: int, context: zmq.asyncio.Context
    ) -> None:
        self.recorder_path = folder / f"flight-{number}"
        self.recorder = FlightRecorder(self.recorder_path, RECORDER_ROWS, create=True)
        address = f"ipc://{folder}/engine-{number}"
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the journal, which admission bounds
        self.socket.bind(address)
        options = ProcessOptions(config, address, str(self.recorder_path))
        self.process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        data = msgspec.msgpack.encode(options, enc_hook=str)
        self.process.stdin.write(len(data).to_bytes(8, "little") + data)
        self.process.stdin.flush()  # left open: its end tells the engine that we are gone

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process (politely within `grace_s`, else by kill) and free all it had. Returns its exit code."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.socket.close()
        self.recorder.close()
        self.recorder_path.unlink(missing_ok=True)
        return self.process.returncode
