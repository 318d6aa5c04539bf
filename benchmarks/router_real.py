#!/usr/bin/env python3
"""Which replica requests go to: real engines on this machine, and the simulation of router.py with their step times.

usage: router_real.py [--model smollm2-135m] [--replicas 2] [--rounds 2] [--per-s 2.0] [--requests 32]

Each replica computes on one thread, on a core of its own, and keeps fewer blocks than all prefixes have. The policies
take turns on the same engines, whose prefix caches are emptied in between. What steps took, as our router has learned
it from the engines, is what those of the simulation take, with the same requests. Figures as in router.py, over the
rounds.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.router import (
    BLOCK_SIZE,
    HASH_SEED,
    POLICIES,
    Ask,
    Figures,
    Machine,
    Simulation,
    arrivals,
    spread,
    tokens,
)
from pagoda.base.config import EngineConfig
from pagoda.base.errors import WorkerDied
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.clients.replicas import Replicas

SMALL = Machine(num_blocks=200, max_num_seqs=16, max_batched_tokens=512, max_model_len=2048, hidden_tokens=0)


def prefixes(rng: np.random.Generator, num_replicas: int, per_s: float, count: int) -> list[Ask]:
    """8 prefixes of 384 tokens, each with questions of 16 to 48; so many per second and replica."""
    shared = [tokens(rng, 384) for _ in range(8)]
    return [
        Ask(at_s, np.concatenate([shared[rng.integers(8)], tokens(rng, 16, 48)]), int(rng.integers(8, 20)))
        for at_s in arrivals(rng, per_s * num_replicas, count * num_replicas)
    ]


class Run:
    """One workload on real engines."""

    def __init__(self, replicas: Replicas, asks: Sequence[Ask]) -> None:
        self._replicas, self._asks = replicas, asks
        self._first_s = np.full(len(asks), np.nan)
        self._num_left = len(asks)
        self._is_over = asyncio.Event()

    async def figures(self) -> Figures:
        loop, before = asyncio.get_running_loop(), self._replicas.stats()
        self._replicas.sinks._sinks[0] = self._take
        began_s = loop.time()
        for handle, ask in enumerate(self._asks):
            loop.call_at(began_s + ask.at_s, partial(self._add, handle, ask))
        await self._is_over.wait()
        await asyncio.sleep(0.5)  # the last statistics
        after = self._replicas.stats()
        share = (after.prefix_hits - before.prefix_hits) / (after.prefix_queries - before.prefix_queries)
        return Figures(share, self._first_s - began_s - [ask.at_s for ask in self._asks])

    def _add(self, handle: int, ask: Ask) -> None:
        sampling = SamplingParams(max_tokens=ask.num_out, ignore_eos=True, temperature=0.0)
        self._replicas.add_request(Request(str(handle), ask.prompt, sampling, handle=handle))

    def _take(self, outputs: EngineCoreOutputs | WorkerDied) -> None:
        assert not isinstance(outputs, WorkerDied), outputs
        handles = outputs.handles
        unseen = handles[np.isnan(self._first_s[handles])]
        self._first_s[unseen] = asyncio.get_running_loop().time()
        for end in outputs.ends:
            assert end.message is None, end.message
            self._num_left -= 1
        if not self._num_left:
            self._is_over.set()


async def run_all(args: argparse.Namespace, asks: Sequence[Sequence[Ask]]) -> tuple[dict[str, list[Figures]], Machine]:
    """Return the figures of each policy and round, and a machine whose steps take as long as the engines' did."""
    machine = SMALL
    replicas = Replicas(
        EngineConfig.from_options(
            model=args.model,
            device="cpu",
            threads=1,
            data_parallel_size=args.replicas,
            prefix_hash_seed=HASH_SEED,
            block_size=BLOCK_SIZE,
            num_blocks=machine.num_blocks,
            max_model_len=machine.max_model_len,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_batched_tokens,
        )
    )
    found: dict[str, list[Figures]] = {name: [] for name in POLICIES}
    try:
        await replicas.start()
        ours = replicas._router
        await Run(replicas, asks[0][: 8 * args.replicas]).figures()  # warms up
        for round_asks in asks:
            for name, policy in POLICIES.items():
                assert await replicas.reset_prefix_cache()
                replicas._router = policy(machine.max_num_seqs, machine.max_batched_tokens, ours.costs)
                found[name].append(await Run(replicas, round_asks).figures())
        costs = ours.costs
    finally:
        await replicas.shutdown()
    times = {"step_s": costs.per_step_s, "row_s": 0.0, "token_s": costs.per_token_s, "pair_s": 0.0, "read_s": 0.0}
    return found, replace(machine, **times)


def line_of(kind: str, policy: str, found: Sequence[Figures]) -> str:
    times = (spread([1e3 * float(np.quantile(one.ttft_s, at)) for one in found], 0) for at in (0.5, 0.99))
    return f"| {kind} | {policy} | {spread([100 * one.share for one in found], 1)} | {' | '.join(times)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--per-s", type=float, default=2.0, help="requests per second and replica")
    parser.add_argument("--requests", type=int, default=32, help="per replica")
    args = parser.parse_args()
    asks = [
        prefixes(np.random.default_rng(seed), args.replicas, args.per_s, args.requests) for seed in range(args.rounds)
    ]
    found, machine = asyncio.run(run_all(args, asks))
    print(f"a step takes {1e3 * machine.step_s:.1f} ms, and {1e3 * machine.token_s:.2f} ms per token\n")
    print("| | policy | cached, % | TTFT p50, ms | p99, ms |\n|---|---|---|---|---|")
    for name in POLICIES:
        print(line_of("real", name, found[name]))
    costs = machine.costs()
    for name, policy in POLICIES.items():
        simulated = [Simulation(args.replicas, policy, costs, machine=machine).run(one) for one in asks]
        print(line_of("simulated", name, simulated), flush=True)


if __name__ == "__main__":
    main()
