"""What every runner does around its engine: read the work, time it, print the line."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def process_age_s() -> float:
    """Seconds since this process was started, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def read_work(path: str) -> list[dict[str, Any]]:
    """The workload's requests."""
    with open(path) as file:
        return json.load(file)


def with_other_tokens(work: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests of the same lengths, to warm up with: they share the same prefixes and cache nothing for `work`."""
    return [{**request, "prompt_token_ids": [token ^ 1 for token in request["prompt_token_ids"]]} for request in work]


def measure(engine: str, work: list[dict[str, Any]], run: Callable[[], int], sequences: int = 1) -> None:
    """Time `run`, which returns the number of output tokens, and print the line.

    Call it when the engine has answered once. `sequences` are asked for per request.
    """
    ready_s = process_age_s()
    begin_s = time.perf_counter()
    num_out = run()
    secs = time.perf_counter() - begin_s
    asked = sum(request["max_tokens"] for request in work) * sequences
    if num_out != asked:
        sys.exit(f"{engine} gave {num_out} tokens of {asked}: not the same work")
    line = {
        "engine": engine,
        "requests": len(work),
        "in": sum(len(request["prompt_token_ids"]) for request in work),
        "out": num_out,
        "secs": round(secs, 3),
        "out_tok_s": round(num_out / secs, 1),
        "cold_start_s": round(ready_s, 2),
    }
    print(json.dumps(line))
