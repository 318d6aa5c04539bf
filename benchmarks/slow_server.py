"""Run small servers into ten kinds of trouble, and write the page that finds the cause of each.

    python -m benchmarks.slow_server > docs/howto/why-is-it-slow.md

The page quotes what the servers said in this run: rows of /requests and /requests/{id}, timings, and a trace.
"""

import contextlib
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.make_random_adapter import make_adapter
from pagoda.base.config import ModelConfig
from pagoda.loading.resolve import resolve_model

MODEL = "smollm2-135m"
WIDTH = 116
WAIT_S = 600  # for an answer, on a machine that is busy
ONE, TWO, ADMIN = "key-one", "key-two", "key-admin"
PAGE = Path(__file__).with_name("slow_server.txt")
"""The page, with {names} in place of what is quoted."""


@dataclass
class Server:
    """A server that runs.   seen: rows of /requests that were looked for."""

    http: httpx.Client
    log: Path

    def get(self, path: str, key: str = ONE) -> Any:
        return self.http.get(path, headers={"Authorization": f"Bearer {key}"}).json()

    def post(self, path: str, body: dict[str, Any], key: str = ONE) -> Any:
        return self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).json()

    def complete(self, name: str, prompt: object, key: str = ONE, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "request_id": name, **fields}
        return self.post("/v1/completions", body, key)

    def row(self, name: str, is_wanted: Callable[[dict[str, Any]], bool], key: str = ONE) -> dict[str, Any]:
        """Return the row of a request in /requests once it is as wanted."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            for row in self.get("/requests", key)["data"]:
                if row["id"] == name and is_wanted(row):
                    return row
            time.sleep(0.02)
        raise TimeoutError(f"{name} was not seen as wanted: {self.get('/requests', key)}")

    def prompt_steps(self) -> list[Any]:
        """Return two steps in a row with tokens of prompts, as the dashboard gets them."""
        steps: list[Any] = []
        with self.http.stream("GET", "/dashboard/stream", headers={"Authorization": f"Bearer {ONE}"}) as events:
            for line in events.iter_lines():
                frame = json.loads(line.removeprefix("data: ") or "{}")
                steps += [step for step in frame.get("steps", ()) if step[3]]
                if len(steps) > 1:
                    return steps[:2]
        raise RuntimeError("the stream has ended")


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Generator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "pagoda", "serve", MODEL, "--port", str(port), *flags]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
            while True:
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield Server(http, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextlib.contextmanager
def at_once(*calls: Callable[[], object]) -> Iterator[None]:
    """Make calls on threads, one after the other a moment later; wait for them after the block."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
        time.sleep(0.15)
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def tokens(count: int, first: int = 1000) -> list[int]:
    return [first + 7 * place % 40_000 for place in range(count)]


RULES = "Answer briefly and politely. Never promise a date. If you are not sure, say so, and ask a colleague. " * 4


def busy_server(server: Server) -> dict[str, Any]:
    """A long prompt, a full batch, two tenants, a grammar, an adapter, a changed prompt, a client that leaves."""
    found: dict[str, Any] = {}
    with at_once(lambda: server.complete("report", tokens(7000))):
        server.row("cmpl-report", lambda row: row["computed_tokens"] > 0)
        with at_once(lambda: server.complete("short", "Hello")):
            found["long_waits"] = server.row("cmpl-short", lambda row: "report" in row["reason"])
            found["long_runs"] = server.row("cmpl-report", lambda row: 0 < row["computed_tokens"] < 7000)
            before, last = server.prompt_steps()
    found["long_step"] = (
        f"last: {last[3]} prompt and {last[4]} output tokens in {1e3 * (last[2] - last[1]):.0f} ms, "
        f"{1e3 * max(0, last[1] - before[2]):.1f} ms after the one before"
    )
    found["long_timeline"] = only(server.get("/requests/cmpl-short"), "timeline")

    batch = [lambda name=f"batch-{n}": server.complete(name, "Once upon a time", max_tokens=700) for n in range(3)]
    with at_once(*batch, lambda: server.complete("guest", "Hi", TWO, max_tokens=4)):
        found["queue_waits"] = server.row("cmpl-guest", lambda row: row["state"] == "waiting", TWO)
        found["queue_others"] = only(server.get("/requests", TWO), "others", "in_line")
        found["tenant_refused"] = server.complete("batch-3", "Once upon a time")
        seen = server.get("/requests", ADMIN)["data"]
        found["tenant_rows"] = [brief(row) for row in seen if row["state"] != "ended"]
    metrics = server.http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN}"}).text.splitlines()
    found["tenant_metric"] = next(line for line in metrics if "rejections_total" in line and "key_concurrency" in line)
    found["queue_timeline"] = only(server.get("/requests/cmpl-guest", TWO), "timeline")

    names = {f"field_{number}": {"type": "string", "pattern": f"^[a-z]{{1,{number}}}$"} for number in range(1, 150)}
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    server.complete("form", "Fill in the form:", structured_outputs={"json": schema}, ignore_eos=False)
    found["grammar_timeline"] = only(server.get("/requests/cmpl-form"), "timeline")
    answer = server.complete(
        "form-2", "Fill in the form:", structured_outputs={"json": schema}, ignore_eos=False, return_timings=True
    )
    found["grammar_again"] = only(answer["timings"], "queue_ms", "queue_reasons")

    server.complete("letter", "Dear Sir", model="clerk")  # of two adapters, memory has room for one
    for name in ("poem", "poem-2"):
        server.complete(name, "Roses are red", model="poet")
    found["adapter_timeline"] = only(server.get("/requests/cmpl-poem"), "timeline")
    found["adapter_again"] = only(server.get("/requests/cmpl-poem-2"), "timeline")

    for name, clock in (("mon", "09:15"), ("tue", "09:16")):
        system = f"You help the customers of Example Ltd. It is {clock} now. {RULES}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "When will my parcel come?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "request_id": name}
        server.post("/v1/chat/completions", body)
    found["miss"] = only(server.get("/requests/chatcmpl-tue"), "prompt_tokens", "cached_tokens", "prefix_miss")

    body = {"model": MODEL, "prompt": "Tell me everything", "max_tokens": 2000, "stream": True, "request_id": "left"}
    with server.http.stream("POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {ONE}"}) as events:
        next(events.iter_lines())
    found["left"] = server.row("cmpl-left", lambda row: row["state"] == "ended")
    time.sleep(0.2)
    line = next(line for line in server.log.read_text().splitlines() if "completions 499 in " in line)
    begin, *fields = line.split(" ", 4)[4].split(", ")
    found["left_log"] = ", ".join((begin, *(field for field in fields if field.split("=")[0] in _SHOWN)))
    found["left_timeline"] = {"timeline": server.get("/requests/cmpl-left")["timeline"][-2:]}
    return found


def small_pool(server: Server, name: str) -> dict[str, Any]:
    """Two requests that do not fit together, under a trace; the first goes on for long enough to be seen."""
    trace: list[Any] = []
    answers: list[Any] = []
    with at_once(
        lambda: trace.append(server.get("/trace?seconds=20", ADMIN)),
        lambda: server.complete("first", tokens(200), max_tokens=780),
        lambda: answers.append(server.complete("second", tokens(200, 2000), max_tokens=450, return_timings=True)),
    ):
        waits = server.row("cmpl-second", lambda row: row["state"] == "preempted" and "held by" in row["reason"])
    timings = only(answers[0]["timings"], "preemptions", "lost_tokens", "preempted_ms", "decode_ms")
    found = {f"{name}_waits": waits, f"{name}_timings": timings}
    found[f"{name}_timeline"] = only(server.get("/requests/cmpl-second"), "timeline")
    entries = trace[0]["traceEvents"]
    track = next(one for one in entries if one["ph"] == "M" and str(one["args"]["name"]).endswith("/cmpl-second"))
    mine = [one for one in entries if (one["pid"], one["tid"]) == (track["pid"], track["tid"])]
    at = next(place for place, one in enumerate(mine) if one["name"].startswith("preempted ("))
    arrow = [one for one in entries if one["ph"] in "sf"][:2]
    waits_then = [one for one in mine[at + 1 :] if one["ph"] == "X"][:3]
    found[f"{name}_trace"] = [track, mine[at], *arrow, *waits_then]
    return found


_SHOWN = ("id", "output_tokens", "decode_ms", "finish_reason", "key")


def useless_drafts(server: Server) -> dict[str, Any]:
    prompt = " ".join(f"{number} is {number * 7919 % 1000}," for number in range(60))
    answer = server.complete("drafts", prompt, max_tokens=150, temperature=1.5, seed=1, return_timings=True)
    shown = only(answer["timings"], "draft_n", "draft_n_accepted", "predicted_n", "predicted_per_second")
    return {"drafts": shown}


def only(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names}


def brief(row: dict[str, Any]) -> dict[str, Any]:
    return only(row, "id", "state", "prompt_tokens", "output_tokens", "blocks", "age_s")


def layout(value: Any, at: int = 0) -> str:
    """Return JSON in lines that are not too long.   at: where it begins in its line."""
    flat = json.dumps(value, ensure_ascii=False)
    if at + len(flat) <= WIDTH or not isinstance(value, dict | list):
        return flat
    pad = " " * (at + 1)
    if isinstance(value, list):
        return "[" + f",\n{pad}".join(layout(one, at + 1) for one in value) + "]"
    lines = [""]
    for name, one in value.items():
        begin = f"{json.dumps(name)}: "
        part = begin + layout(one, at + 1 + len(begin))
        if lines[-1] and (at + len(lines[-1]) + len(part) > WIDTH or "\n" in part):
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + part + ","
    return "{" + f"\n{pad}".join(lines).removesuffix(",") + "}"


def run(folder: Path) -> dict[str, Any]:
    for seed, name in enumerate(("poet", "clerk")):
        make_adapter(folder / name, resolve_model(ModelConfig(model=MODEL)), rank=64, seed=seed)
    keys = ("--api-key", ONE, "--api-key", TWO, "--admin-api-key", ADMIN)
    pool = ("--num-blocks", "64", "--max-model-len", "1000", *keys)
    modules = [word for name in ("poet", "clerk") for word in ("--lora-modules", f"{name}={folder / name}")]
    lora = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "1", "--max-cpu-loras", "1", *modules)
    limits = ("--max-num-seqs", "3", "--max-num-batched-tokens", "256", "--server-limits.max-requests-per-key", "3")
    found: dict[str, Any] = {}
    with serving(folder, *keys, *lora, *limits, "--max-model-len", "8192", "--num-blocks", "1000") as server:
        found |= busy_server(server)
    with serving(folder, *pool, "--preemption-mode", "recompute") as server:
        found |= small_pool(server, "pool")
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8, "adaptive": false}')
    with serving(folder, *pool, "--preemption-mode", "swap", "--num-host-blocks", "64", *drafts) as server:
        found |= useless_drafts(server)
        found |= small_pool(server, "swap")
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder))
    quoted = {name: value if isinstance(value, str) else layout(value) for name, value in found.items()}
    quoted["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, {datetime.date.today().isoformat()}"
    text = PAGE.read_text()
    for name, value in quoted.items():
        text = text.replace(f"{{{name}}}", value)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
