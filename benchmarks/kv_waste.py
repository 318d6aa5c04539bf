#!/usr/bin/env python3
"""How much of a full KV cache is slots that hold no token: the unfilled ends of sequences' last blocks.

usage: kv_waste.py WORKLOAD.json [--block-size 16] [--num-blocks 512] [--max-num-seqs 256]

The scheduler alone, without a model: all requests of the workload wait from the start, so the pool stays as full as it
can be kept. Counted over the steps in which a request waits.
"""

import argparse
from pathlib import Path

import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.bench.workload import WorkItem, read_workload
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput

Shares = list[float]


def shares(items: list[WorkItem], block_size: int, num_blocks: int, max_num_seqs: int) -> tuple[Shares, Shares]:
    """Unfilled and held slots as shares of the pool, one of each for every step in which a request waits."""
    longest = max(len(item.prompt_token_ids) + item.max_tokens for item in items)
    config = SchedulerOptions(max_num_seqs=max_num_seqs)
    cache = CacheConfig(block_size=block_size)
    scheduler = Scheduler(config, cache, (KVGroupSpec(),), num_blocks, max_model_len=longest, clock=VirtualClock())
    for number, item in enumerate(items):
        sampling = SamplingParams(max_tokens=item.max_tokens, ignore_eos=True)
        prompt = np.array(item.prompt_token_ids, np.int32)
        scheduler.add_request(Request(str(number), prompt, sampling, handle=number))
    owner: dict[int, str] = {}
    filled: dict[str, int] = {}
    unfilled: list[float] = []
    held: list[float] = []
    pool_slots = num_blocks * block_size
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        owner.update({init.row: init.request_id for init in output.admitted})
        for row, start, num_new in zip(output.rows.tolist(), output.start, output.num_new, strict=True):
            filled[owner[row]] = int(start + num_new)
        if scheduler.get_request_counts()[1]:
            slots = (num_blocks - scheduler.make_stats().num_free_blocks) * block_size
            held.append(slots / pool_slots)
            unfilled.append((slots - sum(filled[name] for name in scheduler.running_ids())) / pool_slots)
        count = len(output.sample_rows)
        tokens = np.full((count, 1), 7, np.int32)
        scheduler.update_from_output(output, ModelRunnerOutput(output.step, tokens, np.ones(count, np.int32)))
    return unfilled, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    args = parser.parse_args()
    unfilled, held = shares(read_workload(args.workload), args.block_size, args.num_blocks, args.max_num_seqs)
    if not unfilled:
        parser.error(f"no request ever waited: {args.num_blocks} blocks hold the whole workload; use fewer")
    print(
        f"{len(unfilled)} steps with a full pool: {np.mean(unfilled):.1%} of it unfilled slots "
        f"(at most {max(unfilled):.1%}), {np.mean(held):.1%} held"
    )


if __name__ == "__main__":
    main()
