#!/usr/bin/env python3
"""The share of time in which a GPU runs no kernel while the engine decodes. usage: gpu_idle.py MODEL_DIR [options]

Requests of equal length are added, the first steps are left out (prompts, compiling, capturing graphs), and the next
ones are recorded by torch's profiler. With --device cpu it is the time outside of torch's operators: that proves the
script, and says nothing of a GPU.
"""

import argparse
import json
from collections.abc import Iterable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from pagoda.assembly.assemble import build_engine_core
from pagoda.base.config import EngineConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.engine_core import EngineCore

PROMPT_TOKENS = 32


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def longest_gaps_us(intervals: Iterable[tuple[float, float]], count: int = 5) -> list[float]:
    """Return the longest times between the intervals, the longest first."""
    gaps, reached = [], None
    for begin, end in sorted(intervals):
        if reached is not None and begin > reached:
            gaps.append(begin - reached)
        reached = end if reached is None else max(reached, end)
    return sorted(gaps, reverse=True)[:count]


def measure(core: EngineCore, num_seqs: int, num_warm: int, num_steps: int, on_gpu: bool) -> dict[str, object]:
    """Decode `num_seqs` requests; return the idle share of `num_steps` steps."""
    rng = np.random.default_rng(0)
    length = 2 * (num_warm + num_steps)
    for number in range(num_seqs):
        prompt = rng.integers(3, 300, PROMPT_TOKENS).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        core.add_request(Request(f"r{number}", prompt, params, handle=number, seed=number, arrival_time_s=core.now()))
    for _ in range(num_warm):
        core.step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as recorded:
        for _ in range(num_steps):
            core.step()
        if on_gpu:
            torch.cuda.synchronize()
    kind = "CUDA" if on_gpu else "CPU"
    events = [event for event in recorded.events() or () if event.device_type.name == kind]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    if not spans:
        raise SystemExit("the profiler recorded nothing")
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return {
        "num_seqs": num_seqs,
        "steps": num_steps,
        "step_us": whole / num_steps,
        "idle_share": 1 - busy_us(spans) / whole,
        "longest_gaps_us": longest_gaps_us(spans),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    longest = PROMPT_TOKENS + 2 * (given.warm + given.steps) + 8
    options = {"model": given.model, "device": given.device, "dtype": "bfloat16", "max_model_len": longest}
    # On a CPU the profiler sees this thread alone.
    core = build_engine_core(EngineConfig.from_options(**options, async_scheduling=given.device == "cuda"))
    print(json.dumps(measure(core, given.num_seqs, given.warm, given.steps, given.device == "cuda")))
    core.shutdown()


if __name__ == "__main__":
    main()
