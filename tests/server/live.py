"""A real `pagoda serve` for tests: a process of its own on a free port of the loopback interface."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A server without a model: tokens come from the fake executor.
FAKE_ENGINE = ("--distributed-executor-backend", "fake", "--num-blocks", "512", "--max-model-len", "2048")
FAKE_FLAGS = (*FAKE_ENGINE, "--trust-request-chat-template")


@dataclass(frozen=True, slots=True)
class LiveServer:
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    context: ssl.SSLContext | None = None

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        return self._open(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 60.0, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        status, text = self._open(request, timeout_s)
        return status, json.loads(text) if text else None

    def _open(self, request: urllib.request.Request, timeout_s: float) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self.context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def load(self) -> dict[str, Any]:
        return json.loads(self.get("/load")[1])

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Until nothing is live and every block is free; the last /load."""
        end = time.monotonic() + timeout_s
        while True:
            load = self.load()
            if load["server_load"] == load["running"] == load["waiting"] == 0 and load["kv_cache_usage"] == 0:
                return load
            assert time.monotonic() < end, f"the server does not come to rest: {load}"
            time.sleep(0.05)

    def wait_restarted(self, timeout_s: float = 90.0) -> None:
        """After a kill: until that was seen, and the next engine is up."""
        for truth in (503, 200):
            end = time.monotonic() + timeout_s
            while self.get("/health")[0] != truth:
                assert time.monotonic() < end, f"/health does not become {truth}"
                time.sleep(0.005)

    def wait_draining(self, timeout_s: float = 20.0) -> None:
        """After a signal: until it was seen, and new requests are refused."""
        end = time.monotonic() + timeout_s
        while self.get("/health")[0] != 503:
            assert time.monotonic() < end, "the server does not begin to drain"
            time.sleep(0.005)

    def engine_pid(self) -> int:
        """The child of the API process that runs the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")  # python -m MODULE ...; none of a dead child
            if b"engine" in b"".join(words[2:3]).rpartition(b".")[2]:  # not pagoda.engine.templates.worker, say
                return int(pid)
        raise AssertionError("no engine process")

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    folder: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    engine: str | None = None,
    context: ssl.SSLContext | None = None,
    program: tuple[str, ...] = ("pagoda",),
) -> Iterator[LiveServer]:
    """Start, wait until it answers, and end it by SIGTERM.

    engine: module of the engine process, if not the usual.   context: talk TLS.
    program: the module to run instead of pagoda itself, and its first arguments.
    """
    port = free_port()
    log = folder / f"server-{port}.log"
    command = program if engine is None else ("tests.server.serve_with", engine)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "serve", "--port", str(port), *flags],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
    server = LiveServer(f"{'https' if context else 'http'}://127.0.0.1:{port}", process, log, context)
    try:
        _wait_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(server: LiveServer, timeout_s: float = 180.0) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(OSError):
            if server.get("/health", 1.0)[0] == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"not ready in {timeout_s} s: {server.log.read_text()}")
