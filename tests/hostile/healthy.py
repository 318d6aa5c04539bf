"""A client with nothing hostile about it: streams all the time, and keeps what it got.

`python -m tests.hostile.healthy URL KEY REPORT MAX_TOKENS PIDS...`, ended by closing its standard input.
Gaps do not count the time for which the client's main thread and those of PIDS, the server's processes, waited for a
core.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.live import LiveServer

PAUSE_S = 0.05  # between two streams: the machine is for the attack
MAX_REFUSALS = 30  # one after another, of a full server: it says when to come again, and the client does
BODY: dict[str, Any] = {
    "prompt": "The healthy stream",
    "seed": 11,
    "temperature": 0.8,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
    "request_id": "healthy",
}


class CoreWaits:
    """How long the main threads of some processes have waited for a core."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._files: list[int] = []
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):  # it has ended
                self._files.append(os.open(f"/proc/{pid}/task/{pid}/schedstat", os.O_RDONLY))

    def total_s(self) -> float:
        total_s = 0.0
        for file in self._files:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                total_s += int(os.pread(file, 100, 0).split()[1]) / 1e9
        return total_s


def stream(host: str, key: str, max_tokens: int, waits: CoreWaits) -> tuple[list[int], float, str]:
    """One stream: its tokens, its longest gap in seconds (the first token's included), and what went wrong.

    A server that is full refuses it with a 429. The client comes again when it was told to, and its gaps begin then.
    """
    for _ in range(MAX_REFUSALS):
        tokens, longest_s, problem, retry_after_s = _try_stream(host, key, max_tokens, waits)
        if not retry_after_s:
            break
        time.sleep(retry_after_s)
    return tokens, longest_s, problem


def _try_stream(host: str, key: str, max_tokens: int, waits: CoreWaits) -> tuple[list[int], float, str, float]:
    """`stream`, once; and after how many seconds to come again, 0 if it was not refused."""
    connection = http.client.HTTPConnection(host, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    tokens: list[int] = []
    last_s, last_waits_s, longest_s = time.monotonic(), waits.total_s(), 0.0
    try:
        connection.request("POST", "/v1/completions", json.dumps({**BODY, "max_tokens": max_tokens}), headers)
        response = connection.getresponse()
        if response.status != 200:
            retry_after_s = float(response.headers["Retry-After"]) if response.status == 429 else 0.0
            return tokens, longest_s, f"status {response.status}: {response.read(500)!r}", retry_after_s
        for line in response:
            now_s, waits_s = time.monotonic(), waits.total_s()
            longest_s = max(longest_s, now_s - last_s - (waits_s - last_waits_s))
            last_s, last_waits_s = now_s, waits_s
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return tokens, longest_s, f"an error event: {event}", 0.0
                tokens += event["choices"][0]["token_ids"]
        return tokens, longest_s, "", 0.0
    except (OSError, http.client.HTTPException) as error:
        return tokens, longest_s, repr(error), 0.0
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Health:
    """What the healthy client saw.   gaps: (when, seconds) of each stream's longest gap, by time.monotonic()."""

    num_streams: int
    gaps: list[tuple[float, float]]
    problems: list[str]


class HealthyClient:
    """The test's side of the process."""

    def __init__(self, report: Path) -> None:
        self._report = report

    def health(self) -> Health:
        lines = self._report.read_text().splitlines(keepends=True) if self._report.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return Health(
            len(records),
            [(record["at_s"], record["longest_gap_s"]) for record in records],
            [record["problem"] for record in records if record["problem"]],
        )


@contextlib.contextmanager
def healthy_client(server: LiveServer, key: str, report: Path, max_tokens: int) -> Iterator[HealthyClient]:
    """Run the client in a process of its own, so that the attack's work makes no gaps in its clock."""
    pids = map(str, (server.process.pid, server.engine_pid()))
    command = [sys.executable, "-m", "tests.hostile.healthy", server.url, key, str(report), str(max_tokens), *pids]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield HealthyClient(report)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()


def main(url: str, key: str, report: str, max_tokens: int, pids: Sequence[int]) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    host = url.removeprefix("http://")
    waits = CoreWaits([*pids, os.getpid()])
    expected, _, problem = stream(host, key, max_tokens, waits)  # undisturbed: nothing else was sent yet
    with Path(report).open("w") as file:
        if problem or len(expected) != max_tokens:
            problem = problem or f"{len(expected)} tokens of {max_tokens} before the attack"
            print(json.dumps({"at_s": 0, "longest_gap_s": 0, "problem": problem}), file=file, flush=True)
        while not ended.wait(PAUSE_S):
            began_s = time.monotonic()
            tokens, longest_s, problem = stream(host, key, max_tokens, waits)
            if not problem and tokens != expected:
                at = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), -1)
                problem = f"{len(tokens)} tokens, different from the undisturbed stream's at {at}"
            record = {"at_s": began_s, "longest_gap_s": longest_s, "problem": problem}
            print(json.dumps(record), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), list(map(int, sys.argv[5:])))
