"""`pagoda bench startup`: from the command to the first answer, in fresh processes."""

import http.client
import json
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from pagoda.base.errors import ConfigError
from pagoda.cli.bench.workload import JsonLine, percentile, report
from pagoda.process.child_process import module_command

PROMPT = "Once upon a time"
READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """One fresh process. Seconds from its start to its first output (a server's: to ready) and to its answer's end."""

    first_output_s: float
    end_s: float


def startup(
    runs: Annotated[int, typer.Option(min=1, help="Number of processes to start.")] = 5,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model, as for `pagoda generate`.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 16,
    serve: Annotated[bool, typer.Option("--serve", help="Time `pagoda serve` until it is ready.")] = False,
    as_json: JsonLine = False,
) -> None:
    """Time from the command to the first text (--serve: until ready) and to the end of a short answer.

    The first run is counted like the others: it finds files out of the page cache and kernels not yet compiled.
    """
    pagoda = module_command("pagoda.__main__")
    extra = ["--model", model] if model is not None else []
    if serve:
        starts = [time_server([*pagoda, "serve", *extra], max_tokens) for _ in range(runs)]
    else:
        command = [*pagoda, "generate", "--quiet", "--max-tokens", str(max_tokens), *extra, PROMPT]
        starts = [time_start(command) for _ in range(runs)]
    first = "ready" if serve else "first_text"
    first_s = [start.first_output_s for start in starts]
    end_s = [start.end_s for start in starts]
    report(
        {
            "engine": "pagoda",
            "runs": runs,
            "first_run_s": round(first_s[0], 3),
            **{f"{first}_p{p}_s": round(percentile(first_s, p), 3) for p in (50, 90)},
            **{f"answer_p{p}_s": round(percentile(end_s, p), 3) for p in (50, 90)},
        },
        as_json,
    )


def time_start(command: list[str]) -> Start:
    """Run a command to its end. Raises ConfigError with its last words when it fails."""
    begin_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_output_s = time.perf_counter() - begin_s
        _, errors = process.communicate()
        end_s = time.perf_counter() - begin_s
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigError(f"a run ended with exit code {process.returncode}: {last[0]}")
    return Start(first_output_s, end_s)


def time_server(command: list[str], max_tokens: int) -> Start:
    """Start a server on a free port, ask it for an answer once it says that it is ready, and stop it.

    Raises ConfigError with its last words when it ends before that, or is not ready after two minutes.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    begin_s = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
        try:
            while not _is_ready(port):
                if process.poll() is not None or time.perf_counter() - begin_s > READY_TIMEOUT_S:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
                    raise ConfigError(f"the server did not become ready: {last[0]}")
                time.sleep(0.01)
            ready_s = time.perf_counter() - begin_s
            _complete(port, max_tokens)
            return Start(ready_s, time.perf_counter() - begin_s)
        finally:
            process.terminate()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        return _request(port, "GET", "/health")[0] == 200
    except OSError:
        return False


def _complete(port: int, max_tokens: int) -> None:
    status, answer = _request(port, "POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": max_tokens})
    if status != 200:
        raise ConfigError(f"the server answered {status}: {answer}")


def _request(port: int, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_TIMEOUT_S)
    try:
        payload = json.dumps(body) if body is not None else None
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()
