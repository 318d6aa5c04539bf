"""Engines side by side on one workload file: alternating runs, medians, ratios, and the memory bandwidth around them.

An engine is a command that prints the benchmark's JSON line (see README.md in this folder). pagoda is always one of
them:

    python benchmarks/compare.py --workload offline64.json --rounds 3 \\
        --engine "openvino=/envs/ov/bin/python benchmarks/peers/openvino_peer.py MODEL_DIR {workload}" \\
        --engine "pagoda-int8=pagoda bench throughput --json --quantization int8 --workload {workload}"

Rounds run every engine once, one after the other, so that a machine that drifts drifts for all. Ratios are taken round
by round.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(slots=True)
class Engine:
    """One engine and what its runs gave, in output tokens per second; a run that failed is NaN."""

    name: str
    command: str
    out_tok_s: list[float] = field(default_factory=list)
    cold_start_s: list[float] = field(default_factory=list)


def read_bandwidth_gb_s(num_threads: int = 2, mib: int = 256, repeats: int = 5) -> float:
    """Best of some reads of memory by `num_threads` threads, in GB/s."""
    arrays = [np.ones(mib * 2**20 // 8) for _ in range(num_threads)]
    best = 0.0
    for _ in range(repeats):
        threads = [threading.Thread(target=array.max) for array in arrays]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - begin_s) / 1e9)
    return best


def machine() -> str:
    """What the processor calls itself, its widest instructions, and how many of its cores this process may use."""
    flags: list[str] = []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        flags = next((line.split() for line in lines if line.startswith("flags")), flags)
    except (OSError, StopIteration):
        name = platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kinds = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return f"{name} ({kinds[0]}), {cores} cores" if kinds else f"{name}, {cores} cores"


def commit() -> str:
    """The commit of this folder's code, with a plus if it was changed since; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def circumstances() -> dict[str, str]:
    """What every line of results says of where it comes from."""
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "commit": commit()}


def run_once(engine: Engine, workload: Path, timeout_s: float) -> None:
    """Run an engine's command and keep the figures of its last line that is JSON."""
    command = shlex.split(engine.command.format(workload=shlex.quote(str(workload))))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        print(f"  {engine.name}: not done in {timeout_s:.0f} s", file=sys.stderr)
        engine.out_tok_s.append(float("nan"))
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"  {engine.name}: failed ({done.returncode}): {done.stderr.strip()[-300:]}", file=sys.stderr)
        engine.out_tok_s.append(float("nan"))
        return
    figures = json.loads(lines[-1])
    engine.out_tok_s.append(figures["out_tok_s"])
    engine.cold_start_s.append(figures["cold_start_s"])


def summary(engines: list[Engine]) -> list[dict[str, object]]:
    """Per engine: median, all runs, and the median of the first engine's ratio to it, round by round."""
    first = engines[0]
    rows: list[dict[str, object]] = []
    for engine in engines:
        ok = [value for value in engine.out_tok_s if value == value]
        ratios = [a / b for a, b in zip(first.out_tok_s, engine.out_tok_s, strict=True) if a == a and b == b]
        rows.append(
            {
                "engine": engine.name,
                "out_tok_s": round(statistics.median(ok), 1) if ok else None,
                "runs": engine.out_tok_s,
                f"{first.name}_ratio": round(statistics.median(ratios), 2) if ratios else None,
                "cold_start_s": round(statistics.median(engine.cold_start_s), 2) if engine.cold_start_s else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=COMMAND", help="{workload} is filled in")
    parser.add_argument("--pagoda", default="pagoda bench throughput --json --workload {workload}")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per run")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    engines = [Engine("pagoda", args.pagoda)]
    for item in args.engine:
        name, separator, command = item.partition("=")
        if not separator:
            parser.error(f"--engine {item!r}: write NAME=COMMAND")
        engines.append(Engine(name, command))
    before = read_bandwidth_gb_s()
    for number in range(args.rounds):
        for engine in engines:
            run_once(engine, args.workload, args.timeout)
            print(f"round {number + 1} {engine.name}: {engine.out_tok_s[-1]}", file=sys.stderr)
    after = read_bandwidth_gb_s()
    result = {
        "workload": args.workload.stem,
        **circumstances(),
        "rounds": args.rounds,
        "bandwidth_gb_s": [round(before, 1), round(after, 1)],
        "engines": summary(engines),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['workload']}: {args.rounds} rounds, memory reads {before:.1f} GB/s before, {after:.1f} after")
    for row in summary(engines):
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
