"""Nodes of a Ray cluster, started by Ray's own commands."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 180.0
REPOSITORY = Path(__file__).parents[2]


def command_of(program: str, *words: str) -> list[str]:
    """The command line of `ray` or `serve`."""
    module, name = {"ray": ("ray.scripts.scripts", "main"), "serve": ("ray.serve.scripts", "cli")}[program]
    return [sys.executable, "-c", f"from {module} import {name}; {name}()", *words]


@contextlib.contextmanager
def node(folder: Path, *flags: str, **env: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A node that `ray start` has started; all its processes are in the group of the one that this yields."""
    log = folder / f"node-{time.monotonic_ns()}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command_of("ray", "start", "--block", "--node-ip-address", "127.0.0.1", "--disable-usage-stats", *flags),
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
            start_new_session=True,
        )
    try:
        end = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        end_node(process)


def end_node(process: "subprocess.Popen[bytes]") -> None:
    """As if its machine had no power any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
