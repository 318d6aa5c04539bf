#!/usr/bin/env python3
"""What placing requests costs over the recorded events of many replicas: CPU time, messages, and the index.

usage: router_replay.py [--replicas 64] [--workload NAME ...] [--rounds 3]

A run of router.py's simulation is recorded: each request, and each message of each engine, with the events of its
prefix cache. Then what the client of all replicas does with them runs alone, in the same order, as often as `rounds`
says; it must place each request as before. The rest of the simulation is not in the times. They are of the CPU, the
least of the rounds; `of a core` is their sum per second of the recorded run's virtual time.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.router import H100, POLICIES, SLOW, WORKLOADS, Simulation, without_engines
from pagoda.core.cost_model import CostModel
from pagoda.core.events import Routed
from pagoda.core.request import Request
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.router import PrefixIndex


class Recording(Simulation):
    """A run whose requests and messages are noted in their order.

    noted: requests, and messages with the numbers of their engines.   placed: replicas, from 1, of the requests.
    """

    def __init__(self, num_replicas: int, costs: CostModel, slow_times: float = 1.0) -> None:
        super().__init__(num_replicas, POLICIES["ours"], costs, slow_times)
        self.noted: list[Request | tuple[int, bytes]] = []
        self.placed: list[int] = []
        add_request, take = self.replicas.add_request, self._take

        def note_request(request: Request) -> None:
            self.noted.append(request)
            add_request(request)

        def note_place(outputs: EngineCoreOutputs) -> None:
            self.placed += places_of(outputs)
            take(outputs)

        self.replicas.add_request = note_request  # type: ignore[method-assign]
        self.replicas.sinks._sinks[0] = note_place  # type: ignore[assignment]

    def _end_step(self, number: int) -> None:
        self.noted += [(number, data) for data in self.engines[number].sent]
        super()._end_step(number)


def places_of(outputs: EngineCoreOutputs) -> list[int]:
    return [event.replica for event in outputs.events if isinstance(event, Routed)]


def bytes_of(index: PrefixIndex) -> int:
    """Return the memory of an index."""
    held = index._holders
    return sys.getsizeof(held) + sum(sys.getsizeof(one) + sys.getsizeof(bits) for one, bits in held.items())


@dataclass(slots=True)
class Costs:
    """What one replay has cost.

    seconds, counts: by kind: "request", or a message's class.   num_changed: blocks that caches stored or removed.
    most_blocks, most_bytes: of the index.
    """

    seconds: Counter[str] = field(default_factory=Counter[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    num_changed: int = 0
    most_blocks: int = 0
    most_bytes: int = 0


def replay(recording: Recording) -> Costs:
    """Run what the client of the replicas does, and nothing else."""
    costs, placed = Costs(), list[int]()
    replicas, codec = without_engines(len(recording.engines)), wire.Codec(wire.FromEngine)
    replicas.sinks._sinks[0] = lambda outputs: placed.extend(places_of(outputs))  # type: ignore[arg-type]
    for one in recording.noted:
        began_s = time.thread_time()
        if isinstance(one, Request):
            replicas.add_request(one)
            kind = "request"
        else:
            message = codec.decode(one[1])
            replicas.each[one[0]].on_message(message)
            kind = type(message).__name__
        costs.seconds[kind] += time.thread_time() - began_s
        costs.counts[kind] += 1
        if kind == "CacheChanges":
            costs.num_changed += len(message.stored) + len(message.removed)
            costs.most_blocks = max(costs.most_blocks, len(replicas._prefixes))
    costs.most_bytes = bytes_of(replicas._prefixes)
    assert placed == recording.placed, "the replay has placed requests elsewhere"
    return costs


def lines_of(workload: str, num_replicas: int, rounds: int) -> Sequence[str]:
    """Return the lines of the table of one workload."""
    asks = WORKLOADS[workload](np.random.default_rng(0), num_replicas)
    recording = Recording(num_replicas, H100.costs(), SLOW.get(workload, 1.0))
    figures = recording.run(asks)
    virtual_s = recording.clock.now()
    found = [replay(recording) for _ in range(rounds)]
    costs = found[0]
    seconds = {kind: min(one.seconds[kind] for one in found) for kind in costs.seconds}
    num_requests = costs.counts["request"]
    lines = [
        f"{workload}, {num_replicas} replicas: {num_requests:,} requests in {virtual_s:.1f} s of virtual time "
        f"({num_requests / virtual_s:.0f} per s), cached {100 * figures.share:.1f} %, TTFT p50 "
        f"{1e3 * np.quantile(figures.ttft_s, 0.5):.0f} ms, p99 {1e3 * np.quantile(figures.ttft_s, 0.99):.0f} ms; "
        f"{costs.num_changed:,} changes of blocks; the index: at most {costs.most_blocks:,} blocks, at the end "
        f"{costs.most_bytes / 2**20:.1f} MiB",
        "| what | count | per s | us each | of a core |",
        "|---|---|---|---|---|",
    ]
    for kind, count in costs.counts.most_common():
        lines.append(
            f"| {kind} | {count:,} | {count / virtual_s:,.0f} | {1e6 * seconds[kind] / count:.0f} | "
            f"{100 * seconds[kind] / virtual_s:.1f} % |"
        )
    lines.append(f"| all | | | | {100 * sum(seconds.values()) / virtual_s:.1f} % |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for workload in args.workload or ("20 prefixes", "sessions"):
        print("\n".join(lines_of(workload, args.replicas, args.rounds)), "\n", flush=True)


if __name__ == "__main__":
    main()
