"""Share of prompt tokens that the prefix cache finds: attention alone beside models with recurrent states.

Run: python benchmarks/state_hits.py. Only the scheduler runs; what it finds depends on nothing else.
"""

from collections.abc import Iterator

import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec, KVShape
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput

NUM_BLOCKS = 16384
ATTENTION = KVGroupSpec(layers=tuple(range(6)), shape=KVShape(8, 64, 64))
LFM2 = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, tuple(range(6, 16)), KVShape(2, 2048, 0))
GRANITE_ATTENTION = KVGroupSpec(layers=tuple(range(4)), shape=KVShape(4, 128, 128))
GRANITE = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, tuple(range(4, 40)), KVShape(3, 3328, 0, (48, 128, 64)))
MODELS = {
    "attention alone": (ATTENTION,),
    "LFM2-1.2B": (ATTENTION, LFM2),
    "Granite 4 H Tiny": (GRANITE_ATTENTION, GRANITE),
}


def shared_prefixes(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield 64 prompts: one of four instructions of 1,500 tokens, and a question of 50 to 400."""
    instructions = rng.integers(0, 30_000, (4, 1500), np.int32)
    for number in range(64):
        yield np.concatenate([instructions[number % 4], rng.integers(0, 30_000, rng.integers(50, 400), np.int32)])


def conversations(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the prompts of eight conversations in turn: twelve turns, each 50 to 600 tokens longer than the last."""
    known = list(rng.integers(0, 30_000, (8, 300), np.int32))
    for _ in range(12):
        for number in range(8):
            yield known[number]
            known[number] = np.concatenate([known[number], rng.integers(0, 30_000, rng.integers(50, 600), np.int32)])


def hit_share(groups: tuple[KVGroupSpec, ...], prompts: Iterator[np.ndarray]) -> float:
    """Serve the prompts one after the other; return the share of their tokens that was found."""
    options = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=2048)
    scheduler = Scheduler(options, CacheConfig(), groups, NUM_BLOCKS, 16_384, VirtualClock())
    for number, prompt in enumerate(prompts):
        scheduler.add_request(Request(str(number), prompt, SamplingParams(max_tokens=1), handle=number))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            count = len(output.sample_rows)
            sampled = np.zeros((count, 1), np.int32)
            scheduler.update_from_output(output, ModelRunnerOutput(output.step, sampled, np.ones(count, np.int32)))
    stats = scheduler.make_stats()
    return stats.prefix_hits / stats.prefix_queries


def main() -> None:
    print(f"{'':26}{'shared prefixes':>16}{'conversations':>16}")
    for name, groups in MODELS.items():
        shares = [hit_share(groups, make(np.random.default_rng(7))) for make in (shared_prefixes, conversations)]
        print(f"{name:26}{shares[0]:16.1%}{shares[1]:16.1%}")


if __name__ == "__main__":
    main()
