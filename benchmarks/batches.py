#!/usr/bin/env python3
"""A batch file through `pagoda run-batch` and /v1/batches, beside the same prompts in `pagoda bench throughput`.

usage: batches.py [--model smollm2-135m] [--num-prompts 256] [--input-len 64] [--output-len 32] [--rounds 3]

Prompts are random tokens, outputs have exactly --output-len tokens. The three take turns, in another order each round.
Seconds are those of the requests alone: of bench throughput as it says, of run-batch those of a run less those of a run
with one line, of /v1/batches from the answer to the batch's creation until it is completed. Then, on the server: how
long a short request takes alone, and beside a batch.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URL = "/v1/completions"
SHORT = {"prompt": [7] * 16, "max_tokens": 16, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Files:
    """The prompts in each form.   one: a batch file of the first one."""

    workload: Path
    batch: Path
    one: Path


def write_files(folder: Path, given: argparse.Namespace) -> Files:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(given.input_len)] for _ in range(given.num_prompts)]
    most = given.output_len
    work = [{"prompt_token_ids": one, "max_tokens": most, "arrival_s": 0.0} for one in prompts]
    bodies = [{"prompt": one, "max_tokens": most, "ignore_eos": True, "temperature": 0} for one in prompts]
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": URL, "body": body}) for at, body in enumerate(bodies)
    ]
    files = Files(folder / "workload.json", folder / "batch.jsonl", folder / "one.jsonl")
    files.workload.write_text(json.dumps(work))
    files.batch.write_text("\n".join(lines))
    files.one.write_text(lines[0])
    return files


def pagoda(*arguments: str) -> str:
    command = [sys.executable, "-m", "pagoda", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_batch_s(model: str, source: Path) -> float:
    target = source.with_suffix(".out")
    target.unlink(missing_ok=True)
    begin_s = time.perf_counter()
    pagoda("run-batch", str(source), str(target), "--model", model)
    return time.perf_counter() - begin_s


class Server:
    """A server of the model, until the block ends."""

    def __init__(self, model: str, folder: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._log = (folder / "server.log").open("ab")
        command = [sys.executable, "-m", "pagoda", "serve", "--model", model, "--port", str(port), "--no-access-log"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> "Server":
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"the server has ended: see {self._log.name}")
            try:
                self.ask("/v1/models")
            except OSError:
                time.sleep(0.1)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def begin(self, source: Path) -> str:
        """Begin a batch; return its id."""
        head = '--x\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
        parts = [head.format("purpose", ""), "batch\r\n", head.format("file", '; filename="in"'), source.read_text()]
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        request = urllib.request.Request(f"{self._url}/v1/files", ("".join(parts) + "\r\n--x--\r\n").encode(), form)
        with urllib.request.urlopen(request, timeout=600) as response:
            file = json.load(response)["id"]
        return self.ask("/v1/batches", {"input_file_id": file, "endpoint": URL, "completion_window": "24h"})["id"]

    def is_running(self, batch: str) -> bool:
        known = self.ask(f"/v1/batches/{batch}")
        if known["status"] == "failed" or known["request_counts"]["failed"]:
            raise SystemExit(f"the batch failed: {known}")
        return known["status"] != "completed"

    def batch_s(self, source: Path) -> float:
        batch = self.begin(source)
        begin_s = time.perf_counter()
        while self.is_running(batch):
            time.sleep(0.1)
        return time.perf_counter() - begin_s

    def short_ms(self) -> float:
        begin_s = time.perf_counter()
        self.ask(URL, SHORT)
        return 1e3 * (time.perf_counter() - begin_s)

    def short_beside_ms(self, source: Path) -> list[float]:
        """How long short requests take, one after the other, while a batch runs."""
        batch = self.begin(source)
        time.sleep(1.0)
        taken: list[float] = []
        while self.is_running(batch):
            taken.append(self.short_ms())
            time.sleep(0.5)
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(given, Path(name), write_files(Path(name), given))


def measure(given: argparse.Namespace, folder: Path, files: Files) -> None:
    model = given.model

    def throughput_s() -> float:
        shown = pagoda("bench", "throughput", "--model", model, "--workload", str(files.workload), "--json")
        return json.loads(shown.splitlines()[-1])["secs"]

    def offline_s() -> float:
        return run_batch_s(model, files.batch) - run_batch_s(model, files.one)

    def server_s() -> float:
        with Server(model, folder) as server:
            server.batch_s(files.one)  # no other request: a batch would step aside for it
            return server.batch_s(files.batch)

    ways: dict[str, Callable[[], float]] = {
        "bench throughput": throughput_s,
        "run-batch": offline_s,
        "/v1/batches": server_s,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(given.rounds):
        order = list(ways)[number % 3 :] + list(ways)[: number % 3]
        for way in order:
            seconds[way].append(ways[way]())
            print(f"round {number + 1}: {way} {seconds[way][-1]:.2f} s", flush=True)
    base = seconds["bench throughput"]
    for way, each in seconds.items():
        ratio = statistics.median(b / s for b, s in zip(base, each, strict=True))
        median_s = statistics.median(each)
        lines_per_s, tokens_per_s = given.num_prompts / median_s, given.num_prompts * given.output_len / median_s
        print(f"{way}: median {median_s:.2f} s, {lines_per_s:.1f} lines/s, {tokens_per_s:.0f} tok/s, ratio {ratio:.2f}")
    with Server(model, folder) as server:
        alone = [server.short_ms() for _ in range(10)]
        beside = server.short_beside_ms(files.batch)
    print(f"a short request alone: median {statistics.median(alone):.0f} ms, longest {max(alone):.0f} ms")
    if beside:
        print(
            f"beside a batch: median {statistics.median(beside):.0f} ms, longest {max(beside):.0f} ms, first "
            f"{beside[0]:.0f} ms, of {len(beside)}"
        )


if __name__ == "__main__":
    main()
