#!/usr/bin/env python3
"""Workloads with and without graphs of steps that have parts of prompts. usage: mixed_steps.py MODEL_DIR [options]

Each variant is an engine in a process of its own, one after the other; it runs every workload twice, and the second
time is measured. `first` is the time to the first token of single prompts of 100 to 900 tokens. Prints a JSON line per
variant and workload, with the number of steps and the host's milliseconds for each forward, by kind: decodes; chunks
(at most 1,024 tokens, some of them of prompts); large ones. On a CPU nothing is captured: that proves the script.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # as a script it sees its own folder only

from benchmarks.workload import build  # noqa: E402

VARIANTS = {"without": 0, "with": 1024}
WORKLOADS = ("decode1", "decode64", "first", "offline1024", "nano256")


class Watched:
    """Notes what the host spends on forwards."""

    def __init__(self, most_tokens: int) -> None:
        from pagoda.worker import batch_rows
        from pagoda.worker.forward_runner import ForwardRunner, Graphs

        batch_rows._MOST_CHUNK_TOKENS = most_tokens  # pyright: ignore[reportPrivateUsage]
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.captures: list[float] = []
        run, captured = ForwardRunner.run, Graphs._captured  # pyright: ignore[reportPrivateUsage]

        def timed_run(forward: Any, batch: Any, kv: Any, size: Any = None) -> Any:
            begin = time.perf_counter()
            result = run(forward, batch, kv, size)
            is_decode = batch.metadata[0].max_query_len == 1
            kind = "decode" if is_decode else "chunk" if batch.token_ids.shape[0] <= 1024 else "large"
            self.seconds[kind].append(time.perf_counter() - begin)
            return result

        def timed_capture(*args: Any) -> Any:
            begin = time.perf_counter()
            graph = captured(*args)
            self.captures.append(time.perf_counter() - begin)
            return graph

        runner: Any = ForwardRunner
        runner.run = timed_run
        graphs: Any = Graphs
        graphs._captured = timed_capture

    def begin(self) -> None:
        self.seconds.clear()
        self.captures.clear()

    def report(self) -> dict[str, object]:
        kinds = {
            kind: {"steps": len(spent), "host_ms": round(1e3 * sum(spent) / len(spent), 3)}
            for kind, spent in sorted(self.seconds.items())
        }
        longest = round(1e3 * max(self.captures, default=0.0), 1)
        return {**kinds, "captures": len(self.captures), "longest_capture_ms": longest}


def run_variant(name: str, model: str, device: str, workloads: list[str], small: bool) -> None:
    begin_s = time.perf_counter()
    watched = Watched(VARIANTS[name])
    from pagoda.cli.bench.throughput import GREEDY, run_at_once, with_other_tokens
    from pagoda.cli.bench.workload import WorkItem
    from pagoda.llm import LLM

    options: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_model_len": 256} if small else {}
    llm = LLM(model, device=device, dtype="bfloat16", **options)
    run_at_once(llm, [WorkItem(list(range(10, 40)), 8)])
    print(json.dumps({"variant": name, "ready_s": round(time.perf_counter() - begin_s, 1)}), flush=True)
    rng = random.Random(0)
    for workload in workloads:
        if workload == "first":
            items = [WorkItem([rng.randrange(10, 300) for _ in range(rng.randint(100, 900))], 1) for _ in range(40)]
        else:
            rows = build(workload)
            items = [WorkItem(row["prompt_token_ids"], row["max_tokens"]) for row in rows]  # type: ignore[arg-type]
        if small:
            items = [
                replace(item, prompt_token_ids=[token % 200 + 10 for token in item.prompt_token_ids[:40]], max_tokens=4)
                for item in items[:20]
            ]
        groups = [[item] for item in items] if workload == "first" else [items]
        for each in (with_other_tokens(group) for group in groups):
            run_at_once(llm, each, GREEDY)
        first_captures = watched.report()
        watched.begin()
        begin_s = time.perf_counter()
        num_output = sum(run_at_once(llm, group, GREEDY) for group in groups)
        secs = time.perf_counter() - begin_s
        found: dict[str, object] = {"variant": name, "workload": workload, "secs": round(secs, 3)}
        if workload == "first":
            found["first_token_ms"] = round(1e3 * secs / len(groups), 2)
        else:
            found["out_tok_s"] = round(num_output / secs, 1)
        warm_up = {name: first_captures[name] for name in ("captures", "longest_capture_ms")}
        print(json.dumps({**found, **watched.report(), "warm_up": warm_up}), flush=True)
        watched.begin()
    import torch

    if device == "cuda":
        print(json.dumps({"variant": name, "reserved_mib": torch.cuda.memory_reserved() >> 20}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder; if it is not there, it is made with random weights")
    parser.add_argument("--shape", default="qwen3-0.6b", help="of the model to make")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--small", action="store_true", help="a few short requests: to rehearse")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant is not None:
        run_variant(given.variant, str(given.model), given.device, given.workloads, given.small)
        return
    if not (given.model / "config.json").exists():
        make = [sys.executable, str(HERE / "make_random_model.py"), given.shape, str(given.model)]
        subprocess.run([*make, "--device", given.device], check=True)
    for variant in given.variants:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--variant", variant], check=True)


if __name__ == "__main__":
    main()
