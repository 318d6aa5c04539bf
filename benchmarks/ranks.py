#!/usr/bin/env python3
"""What several ranks cost and bring. usage: ranks.py PART [--model FOLDER] [--rounds 5]

Parts, each a JSON line per figure:
  sums     all-reduce between two ranks of 4 KiB, 64 KiB and 1 MiB: native next to torch.distributed's gloo, us
  steps    a decode step of 1, 64 and 256 rows in another process next to one in this process, us; bytes on the wire
  halves   two ranks of one thread next to one of two threads: tokens per second of prompts, and of decoding
  kill     seconds from `kill -9` of one of a server's two ranks to the next token of a stream

What is compared runs alternately; figures are medians of rounds. FOLDER is a checkpoint, as make_random_model.py writes
them: by default the shape `tiny` (`halves`: llama-3.2-1b, 2.5 GB), in a temporary folder.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pagoda.assembly.assemble import build_engine_core
from pagoda.base.config import EngineConfig
from pagoda.base.ranks import RankPlace
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.executor import Executor
from pagoda.engine.wire import make_encoder
from pagoda.executors.messages import Reply, Step
from pagoda.kernels.collectives.shared_memory import SharedGroup, create_segment
from pagoda.kernels.native.arguments import prepare_call, torch_facts
from pagoda.kernels.native.library import load
from pagoda.ops.forward import OP_TABLE

SUMS = {4 << 10: 2000, 64 << 10: 500, 1 << 20: 60}
"""Bytes of a sum, and how many make a round; gloo's are a tenth."""
ROWS = (1, 64, 256)
PROMPT, PROMPTS = 480, 4


def say(part: str, **figures: object) -> None:
    print(json.dumps({"part": part} | figures), flush=True)


# ---- sums


def sums(rounds: int) -> None:
    """Start two ranks, which measure."""
    descriptor = create_segment(load(), 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, __file__, "sums", "--rounds", str(rounds), "--of-rank", str(descriptor), str(port)]
    ranks = [subprocess.Popen([*words, str(rank)], pass_fds=[descriptor]) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]


def sums_of_rank(descriptor: int, port: int, rank: int, rounds: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    if (os.cpu_count() or 1) >= 2:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    library = load()
    group = SharedGroup(library, descriptor, RankPlace(rank, 2))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for num_bytes, count in SUMS.items():
        x = torch.randn(16, num_bytes // 64)
        out, other = torch.empty_like(x), x.clone()
        call = prepare_call(OP_TABLE["all_reduce"], {"x": x, "ranks": group}, torch_facts, lambda _: 0)
        for record, tensor in ((call.record.x, x), (call.record.out, out)):  # type: ignore[attr-defined]
            record.data, record.rows = tensor.data_ptr(), tensor.shape[0]
        native, arguments = library["all_reduce"], byref(call.record)

        def us(call: Callable[[], object], count: int) -> float:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return 1e6 * (time.perf_counter() - begin) / count

        pairs = [
            (
                us(lambda native=native, arguments=arguments: native(arguments, 1), count),
                us(lambda other=other: dist.all_reduce(other), count // 10),
            )
            for _ in range(rounds)
        ]
        group.check()
        if rank == 0:
            own, gloo = (statistics.median(times) for times in zip(*pairs, strict=True))
            say("sums", bytes=num_bytes, native_us=round(own, 1), gloo_us=round(gloo, 1))
    dist.barrier()
    dist.destroy_process_group()


# ---- engines


class Recorded:
    """An executor that keeps what crossed it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.records = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, output: SchedulerOutput) -> Any:
        future = self._executor.submit(output)
        if self.records:
            self.steps.append((output, future.result()))
        return future


def build(model: Path, recorded: list[Recorded] | None = None, **options: Any) -> EngineCore:
    def wrap(executor: Executor, _: int) -> Executor:
        if recorded is None:
            return executor
        recorded.append(Recorded(executor))
        return recorded[-1]  # type: ignore[return-value]

    settings = {"max_num_seqs": 256, "enable_prefix_caching": False, "kv_cache_memory": "512MiB", **options}
    return build_engine_core(EngineConfig.for_engine(model=str(model), **settings), wrap_executor=wrap)


def add(core: EngineCore, rows: int, prompt: int, outputs: int) -> None:
    for number in range(rows):
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        tokens = np.random.default_rng(number).integers(0, 250, prompt).astype(np.int32)
        request = Request(f"r{number}", tokens, params, handle=number, seed=number, arrival_time_s=core.now())
        core.add_request(request)


def run(core: EngineCore, steps: int | None = None) -> float:
    """Return the seconds of so many steps, or of all there are."""
    begin, done = time.perf_counter(), 0
    while core.has_unfinished_requests() and done != steps:
        core.step()
        done += 1
    return time.perf_counter() - begin


def steps(model: Path, rounds: int) -> None:
    recorded: list[Recorded] = []
    here = build(model, recorded, distributed_executor_backend="in_process", threads=1)
    there = build(model, distributed_executor_backend="mp", threads=1)
    encoder = make_encoder()
    count = 40
    for rows in ROWS:
        for core in (here, there):
            add(core, rows, 16, 20 + (rounds + 1) * count)
            run(core, 12)  # the prompts
        pairs = [(run(here, count), run(there, count)) for _ in range(rounds)]
        own, other = (1e6 * statistics.median(times) / count for times in zip(*pairs, strict=True))
        recorded[0].records, recorded[0].steps = True, []
        for core in (here, there):
            run(core)
        recorded[0].records = False
        output, result = recorded[0].steps[len(recorded[0].steps) // 2]
        reply = Reply(0, 1, msgspec.Raw(encoder.encode(result)))
        say(
            "steps",
            rows=rows,
            in_process_us=round(own, 1),
            multi_process_us=round(other, 1),
            difference_us=round(other - own, 1),
            step_bytes=len(encoder.encode(Step(1, output))),
            reply_bytes=len(encoder.encode(reply)),
        )
    for core in (here, there):
        core.shutdown()


def halves(model: Path, rounds: int) -> None:
    engines = {
        "one": build(model, threads=2, kv_cache_memory="256MiB"),
        "two": build(model, threads=1, tensor_parallel_size=2, kv_cache_memory="256MiB"),
    }
    works = {"prefill": (PROMPTS, PROMPT, 1), "decode1": (1, 16, 33), "decode8": (8, 16, 33)}
    for core in engines.values():
        add(core, 1, 16, 4)
        run(core)
    for name, (rows, prompt, outputs) in works.items():
        speeds: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(rounds):
            for engine, core in engines.items():
                add(core, rows, prompt, outputs)
                if outputs > 1:
                    run(core, 1)
                tokens = rows * prompt if outputs == 1 else rows * (outputs - 1)
                speeds[engine].append(tokens / run(core))
        one, two = (statistics.median(speeds[engine]) for engine in engines)
        say("halves", work=name, one_tok_s=round(one, 1), two_tok_s=round(two, 1), ratio=round(two / one, 3))
    for core in engines.values():
        core.shutdown()


# ---- a server


@contextmanager
def served(model: Path) -> Iterator[tuple[int, int]]:
    """A server of two ranks: its process and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", "--model", str(model), "--tensor-parallel-size", "2", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "pagoda", *words, "--kv-cache-memory", "64MiB"])
    try:
        while not is_ready(port):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def ranks_of(server: int) -> list[int]:
    """Return the processes of the ranks below a server."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: list[int] = []
    for pid in sorted(parents):
        above = pid
        while above in parents and above != server:
            above = parents[above]
        if above == server and b"assembly.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found


def next_token(response: HTTPResponse) -> None:
    while not response.readline().startswith(b"data: {"):
        pass


def kill(model: Path, rounds: int) -> None:
    with served(model) as (server, port):
        waits: list[float] = []
        for number in range(rounds):
            connection = HTTPConnection("127.0.0.1", port, timeout=120)
            body = {"model": str(model), "prompt": "a b c", "max_tokens": 400, "stream": True, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for _ in range(20):
                next_token(response)
            os.kill(ranks_of(server)[number % 2], signal.SIGKILL)
            killed = time.perf_counter()
            gap, last = 0.0, killed
            while gap < 0.3:  # tokens that were on their way are not those of the next engine
                next_token(response)
                now = time.perf_counter()
                gap, last = max(gap, now - last), now
            waits.append(last - killed)
            connection.close()
        say("kill", seconds=round(statistics.median(waits), 2), all=[round(wait, 2) for wait in waits])


@contextmanager
def model_of(given: Path | None, shape: str) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        maker = Path(__file__).parent / "make_random_model.py"
        subprocess.run([sys.executable, str(maker), shape, folder], check=True, stdout=subprocess.DEVNULL)
        yield Path(folder)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["sums", "steps", "halves", "kill"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--of-rank", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.of_rank is not None:
        descriptor, port, rank = given.of_rank
        sums_of_rank(descriptor, port, rank, given.rounds)
    elif given.part == "sums":
        sums(given.rounds)
    else:
        part = {"steps": steps, "halves": halves, "kill": kill}[given.part]
        with model_of(given.model, "llama-3.2-1b" if given.part == "halves" else "tiny") as model:
            part(model, given.rounds)


if __name__ == "__main__":
    main()
