"""A real `pagoda serve` for tests: a process of its own on a free port of the loopback interface."""

import contextlib
import json
import os
import re
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

from tests.engine.steps import Steps

# A server without a model: tokens come from the fake executor.
FAKE_ENGINE = ("--distributed-executor-backend", "fake", "--num-blocks", "512", "--max-model-len", "2048")
FAKE_FLAGS = (*FAKE_ENGINE, "--trust-request-chat-template", "--hf-overrides.is-matryoshka")


@dataclass(frozen=True, slots=True)
class LiveServer:
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    context: ssl.SSLContext | None = None
    _steps: Steps | None = None
    key: str | None = None

    @property
    def steps(self) -> Steps:
        """How many steps the engine may compute, where `serving` was asked for that."""
        assert self._steps is not None, "serve with stepped=True"
        return self._steps

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        return self._open(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 60.0, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        status, text = self._open(request, timeout_s)
        return status, json.loads(text) if text else None

    def _open(self, request: urllib.request.Request, timeout_s: float) -> tuple[int, str]:
        if self.key is not None:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self.context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def load(self) -> dict[str, Any]:
        return json.loads(self.get("/load")[1])

    def metric(self, name: str) -> float:
        """The value of a metric without labels of its own."""
        lines = self.get("/metrics")[1].splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def logged(self, request_id: str, timeout_s: float = 20.0) -> str:
        """The line of the access log of a request, which is written after its answer."""
        end = time.monotonic() + timeout_s
        while not (found := re.findall(rf".* request_id={request_id}[, \n].*", self.log.read_text())):
            assert time.monotonic() < end, "no such line"
            time.sleep(0.01)
        return str(found[0])

    def wait_load(self, count: int, timeout_s: float = 30.0) -> None:
        """Until the server holds this many prompts of requests, no more and no fewer."""
        end = time.monotonic() + timeout_s
        while (load := self.load())["server_load"] != count:
            assert time.monotonic() < end, f"the server does not come to hold {count} prompts: {load}"
            time.sleep(0.005)

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
                time.sleep(0.02)

    def wait_restarts(self, num_restarts: int, timeout_s: float = 90.0) -> None:
        """After a kill: until the server has counted so many restarts since it began, and the next engine is up."""
        end = time.monotonic() + timeout_s
        while self.load()["engine_restarts"] < num_restarts or self.get("/health")[0] != 200:
            assert time.monotonic() < end, "no other engine is up"
            time.sleep(0.05)

    def wait_draining(self, timeout_s: float = 20.0) -> None:
        """After a signal: until it was seen, and new requests are refused."""
        end = time.monotonic() + timeout_s
        while self.get("/health")[0] != 503:
            assert time.monotonic() < end, "the server does not begin to drain"
            time.sleep(0.005)

    def engine_pid(self) -> int:
        """The child of the API process that runs the engine."""
        for pid, command in children(self.process.pid).items():
            words = command.split(b"\0")  # python FLAGS run_module.py FOLDER MODULE ...; none of a dead child
            modules = [words[at + 2] for at, word in enumerate(words) if word.endswith(b"run_module.py")]
            if any(b"engine" in module.rpartition(b".")[2] for module in modules):
                return pid
        raise AssertionError("no engine process")

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback interface that no other process is given during the block.

    Servers can still listen on it, as they bind with SO_REUSEADDR (see socket(7)).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def children(pid: int) -> dict[int, bytes]:
    """Return the command lines of the children of all threads of a process; empty for those that have just ended."""
    found: dict[int, bytes] = {}
    gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)
    with gone:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with gone:
                for child in (task / "children").read_text().split():
                    found[int(child)] = b""
                    with gone:
                        found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes()
    return found


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, whether or not its parent has noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def serving(
    folder: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    engine: str | None = None,
    context: ssl.SSLContext | None = None,
    program: tuple[str, ...] = ("pagoda",),
    stepped: bool = False,
) -> Iterator[LiveServer]:
    """Start, wait until it answers, and end it by SIGTERM.

    engine: module of the engine process, if not the usual.   context: talk TLS.
    program: the module to run instead of pagoda itself, and its first arguments.
    stepped: the test can limit the engine's steps: LiveServer.steps.
    """
    with reserved_port() as port:
        log = folder / f"server-{port}.log"
        steps = Steps(folder / f"steps-{port}") if stepped else None
        if stepped:
            engine = engine or "tests.engine.stepped_engine"
            env = {**(env or {}), "ENGINE_STEPS": str(folder / f"steps-{port}")}
        command = program if engine is None else ("tests.server.serve_with", engine)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", *command, "serve", "--port", str(port), *flags],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        server = LiveServer(f"{'https' if context else 'http'}://127.0.0.1:{port}", process, log, context, steps)
        try:
            _wait_ready(server)
            yield server
        finally:
            if steps is not None:
                steps.release()  # a held engine would not end in time
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(server: LiveServer, timeout_s: float = 600.0) -> None:
    """The first server on a machine compiles its kernels, which takes minutes where the cores are shared."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(OSError):
            if server.get("/health", 1.0)[0] == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"not ready in {timeout_s} s: {server.log.read_text()}")
