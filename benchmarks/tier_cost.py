#!/usr/bin/env python3
"""What a KV tier costs requests: an engine with one beside an engine without, on four workloads.

usage: tier_cost.py [--model smollm2-135m] [--slices 10] [--workload NAME ...] [--host SIZE]

Two processes with an engine each take turns. A slice is a few requests at once; both run the same slices, the one that
begins changes from slice to slice, and half a second passes after each, in which a tier writes what it still has to.
Printed is, per workload: the times without a tier added up, and the median over the slices of the time with a tier,
divided by that without, with its quartiles. The outputs must be equal.

prefixes    20 prefixes of 512 tokens, each with 64 of its own
sessions    4 agents, whose turns add 300 tokens
bursts      12 prompts of 128 tokens that share nothing
hot         one prefix of 1,024 tokens, 12 times, each with 32 of its own
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PAUSE_S = 0.5


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 20_000) for _ in range(count)]


def prefixes(rng: random.Random, sessions: list[list[int]]) -> tuple[list[list[int]], int]:
    return [some(random.Random(rng.randrange(20)), 512) + some(rng, 64) for _ in range(8)], 16


def agents(rng: random.Random, sessions: list[list[int]]) -> tuple[list[list[int]], int]:
    for tokens in sessions:
        tokens += some(rng, 300)
    return sessions, 24


def bursts(rng: random.Random, sessions: list[list[int]]) -> tuple[list[list[int]], int]:
    return [some(rng, 128) for _ in range(12)], 16


def hot(rng: random.Random, sessions: list[list[int]]) -> tuple[list[list[int]], int]:
    prefix = some(random.Random(-1), 1024)
    return [prefix + some(rng, 32) for _ in range(12)], 24


WORKLOADS: dict[str, Callable[[random.Random, list[list[int]]], tuple[list[list[int]], int]]] = {
    "prefixes": prefixes,
    "sessions": agents,
    "bursts": bursts,
    "hot": hot,
}
"""Each returns the prompts of a slice, and how many tokens each answer has."""


def serve(args: argparse.Namespace) -> None:
    """Run each slice that a line of standard input asks for; print its seconds and its outputs."""
    from pagoda import LLM, SamplingParams

    tier = {"kv_tier": args.tier} if args.tier else {}
    llm = LLM(args.model, max_num_seqs=16, max_model_len=8192, kv_cache_memory="1GiB", **tier)
    sessions: list[list[int]] = [[] for _ in range(4)]
    print("ready", flush=True)
    for line in sys.stdin:
        name, number = json.loads(line)
        prompts, num_tokens = WORKLOADS[name](random.Random(f"{name} {number}"), sessions)
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        begin_s = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin_s
        answers = [list(one.outputs[0].token_ids) for one in outputs]
        if name == "sessions":
            for tokens, answer in zip(sessions, answers, strict=True):
                tokens += answer
        time.sleep(PAUSE_S)
        print(json.dumps([seconds, answers]), flush=True)


class Child:
    """A process with an engine.   tier: its kv_tier; "": none."""

    def __init__(self, tier: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", "--tier", tier]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read_line()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def run(self, name: str, number: int) -> tuple[float, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, number]) + "\n")
        self._process.stdin.flush()
        seconds, answers = json.loads(self._read_line())
        return seconds, answers

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--host", help="keep blocks in memory, too: at most so many bytes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tier", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        host = f"host={args.host}," if args.host else ""
        children = Child(f"{host}disk={folder}:16GiB"), Child("")
        for name in args.workload or [*WORKLOADS]:
            for child in children:
                child.run(name, -1)  # warms it up
            times: list[tuple[float, float]] = []
            for number in range(args.slices):
                order = (0, 1) if number % 2 else (1, 0)
                found = {at: children[at].run(name, number) for at in order}
                assert found[0][1] == found[1][1], "the outputs must be equal"
                times.append((found[0][0], found[1][0]))
            low, median, high = statistics.quantiles([one / other for one, other in times], n=4)
            without_s = sum(other for _, other in times)
            print(
                f"{name:10} {without_s:6.1f} s without; with a tier {median:.3f} ({low:.3f} to {high:.3f})", flush=True
            )
        for child in children:
            child.close()


if __name__ == "__main__":
    main()
