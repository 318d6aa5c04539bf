#!/usr/bin/env python3
"""Which replica requests go to: our router beside three others, on a virtual clock.

usage: router.py [--replicas 4] [--seeds 3] [--workload NAME ...] [--policy NAME ...]
       router.py --costs

The replicas are the real ones (Replicas, with its journals and its router), and so is what they send requests to: the
loop of the engine process, EngineCore, Scheduler, KV cache, and their messages. Only the model is missing: a step takes
as long as the cost model says, which is fitted to what Llama-3.1-8B takes on an H100 (docs/measurements/gpu.md), and no
process runs. Equal seeds give equal figures on any machine.

For each workload and policy: share of the prompts' tokens that caches had, and the median and 99th percentile of the
time to the first token in ms; each the median over the seeds, with the least and the most.
"""

import argparse
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq

from pagoda.assembly.engine_process import EngineServer
from pagoda.base.clock import VirtualClock
from pagoda.base.config import EngineConfig
from pagoda.base.errors import WorkerDied
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.cost_model import CostModel, RowWork
from pagoda.core.kv import KVGroupSpec, hashes_of_prompt
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.engine import wire
from pagoda.engine.clients.replicas import Replicas
from pagoda.engine.clients.router import PrefixIndex, ReplicaLoad, RoutedBecause, Router
from pagoda.engine.engine_core import EngineCore

BLOCK_SIZE = 16
VOCABULARY = 32_000
ANSWER = 7  # each token of each output
HASH_SEED = 1
STATS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """What each replica has, and what its steps take.

    By default, Llama-3.1-8B on an H100: a step of one row takes 4.27 ms, of 64 rows 5.42, and 35,500 tokens of long
    prompts are computed per second.
    hidden_tokens: of a step, that cost nothing, because reading the weights takes longer.
    """

    num_blocks: int = 8192  # 131,072 tokens
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    max_model_len: int = 32_768
    step_s: float = 4.25e-3
    row_s: float = 13e-6
    token_s: float = 24e-6
    hidden_tokens: int = 128
    pair_s: float = 1e-9
    read_s: float = 0.04e-6

    def costs(self) -> CostModel:
        """Return a cost model that has seen steps of all sizes."""
        costs, rng = CostModel(), np.random.default_rng(0)
        for _ in range(600):
            num_rows = int(rng.integers(1, self.max_num_seqs))
            start = rng.integers(0, 20_000, num_rows).astype(np.int32)
            new = np.ones(num_rows, np.int32)
            new[0] = 2 ** rng.integers(0, 12)
            pairs, read = new * (start + new / 2), start + new
            tokens = max(0, int(new.sum()) - self.hidden_tokens)
            seconds = self.step_s + num_rows * self.row_s + tokens * self.token_s
            seconds += pairs.sum() * self.pair_s + read.sum() * self.read_s
            costs.observe_step(RowWork(start, new), float(seconds))
        return costs


H100 = Machine()


# ---- the policies beside ours


class _Other(Router):
    """A policy.   keys: by index, what is least where the request goes; equal ones take turns."""

    def keys(self, num_cached: Sequence[int], loads: Sequence[ReplicaLoad]) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def choose(
        self, num_tokens: int, num_seqs: int, loads: Sequence[ReplicaLoad], num_cached: Sequence[int]
    ) -> tuple[int, RoutedBecause]:
        keys = self.keys(num_cached, loads)
        best = [index for index, key in enumerate(keys) if key == min(keys)]
        self._last = next((index for index in best if index > self._last), best[0])
        return self._last, RoutedBecause.TURN


class RoundRobin(_Other):
    def keys(self, num_cached: Sequence[int], loads: Sequence[ReplicaLoad]) -> list[tuple[int, ...]]:
        return [()] * len(loads)


class LeastLoaded(_Other):
    """The fewest unfinished sequences."""

    def keys(self, num_cached: Sequence[int], loads: Sequence[ReplicaLoad]) -> list[tuple[int, ...]]:
        return [(load.num_seqs,) for load in loads]


class PrefixFirst(_Other):
    """The longest cached prefix; of equal ones, the fewest unfinished sequences."""

    def keys(self, num_cached: Sequence[int], loads: Sequence[ReplicaLoad]) -> list[tuple[int, ...]]:
        return [(-cached, load.num_seqs) for cached, load in zip(num_cached, loads, strict=True)]


POLICIES: Mapping[str, type[Router]] = {
    "ours": Router,
    "least loaded": LeastLoaded,
    "round robin": RoundRobin,
    "prefix first": PrefixFirst,
}


# ---- workloads


@dataclass(frozen=True, slots=True)
class Ask:
    """A request at a time, and what follows `pause_s` after its end."""

    at_s: float
    prompt: np.ndarray
    num_out: int
    then: "Callable[[float], Ask | None]" = lambda _: None


Workload = Callable[[np.random.Generator, int], list[Ask]]
"""Makes the requests for so many replicas."""


def tokens(rng: np.random.Generator, low: int, high: int | None = None) -> np.ndarray:
    """Return random tokens: `low`, or between `low` and `high`."""
    return rng.integers(0, VOCABULARY, low if high is None else rng.integers(low, high), np.int32)


def arrivals(rng: np.random.Generator, per_s: float, count: int) -> list[float]:
    return np.cumsum(rng.exponential(1 / per_s, count)).tolist()


def prefixes(rng: np.random.Generator, num_replicas: int) -> list[Ask]:
    """20 prefixes of 8,000 tokens, more than a cache holds, each with questions of 50 to 400; 6 per s and replica."""
    shared = [tokens(rng, 8000) for _ in range(20)]
    return [
        Ask(at_s, np.concatenate([shared[rng.integers(20)], tokens(rng, 50, 400)]), int(rng.integers(20, 100)))
        for at_s in arrivals(rng, 6.0 * num_replicas, 60 * num_replicas)
    ]


def sessions(rng: np.random.Generator, num_replicas: int) -> list[Ask]:
    """Agents, 10 per replica: each turn adds 200 to 2,000 tokens and its answer to the last prompt; eight turns."""
    system = tokens(rng, 1500)

    def turn(at_s: float, known: np.ndarray, num_left: int) -> Ask:
        prompt, num_out = np.concatenate([known, tokens(rng, 200, 2000)]), int(rng.integers(30, 200))
        pause_s = rng.exponential(1.0)

        def then(ended_s: float) -> Ask | None:
            answered = np.concatenate([prompt, np.full(num_out, ANSWER, np.int32)])
            return turn(ended_s + pause_s, answered, num_left - 1) if num_left > 1 else None

        return Ask(at_s, prompt, num_out, then)

    return [
        turn(at_s, np.concatenate([system, tokens(rng, 500, 4000)]), 8)
        for at_s in rng.uniform(0, 5, 10 * num_replicas).tolist()
    ]


def bursts(rng: np.random.Generator, num_replicas: int) -> list[Ask]:
    """Every two seconds 16 requests per replica at once: one of 20 prefixes of 2,000 tokens, and up to 3,000 more."""
    shared = [tokens(rng, 2000) for _ in range(20)]
    return [
        Ask(
            2.0 * burst + number * 1e-4,
            np.concatenate([shared[rng.integers(20)], tokens(rng, 50, 3000)]),
            int(rng.integers(20, 150)),
        )
        for burst in range(5)
        for number in range(16 * num_replicas)
    ]


def hot(rng: np.random.Generator, num_replicas: int) -> list[Ask]:
    """Nine of ten requests begin with the same 6,000 tokens, the others with nothing known; 12 per s and replica."""
    shared = tokens(rng, 6000)
    return [
        Ask(
            at_s,
            tokens(rng, 4000, 8000) if rng.random() < 0.1 else np.concatenate([shared, tokens(rng, 50, 600)]),
            int(rng.integers(20, 100)),
        )
        for at_s in arrivals(rng, 12.0 * num_replicas, 80 * num_replicas)
    ]


def unshared(rng: np.random.Generator, num_replicas: int) -> list[Ask]:
    """Nothing is shared: prompts of log-normal length, 800 tokens in the middle; 12 per s and replica."""
    lengths = np.clip(rng.lognormal(np.log(800), 1.2, 80 * num_replicas), 16, 30_000).astype(int)
    return [
        Ask(at_s, tokens(rng, length), int(rng.integers(20, 150)))
        for at_s, length in zip(arrivals(rng, 12.0 * num_replicas, len(lengths)), lengths.tolist(), strict=True)
    ]


def slow(rng: np.random.Generator, num_replicas: int) -> list[Ask]:
    """As `bursts` and `prefixes` need not tell: 2,000-token prefixes; the first replica takes three times as long."""
    shared = [tokens(rng, 2000) for _ in range(20)]
    return [
        Ask(at_s, np.concatenate([shared[rng.integers(20)], tokens(rng, 50, 2000)]), int(rng.integers(20, 100)))
        for at_s in arrivals(rng, 10.0 * num_replicas, 80 * num_replicas)
    ]


WORKLOADS: Mapping[str, Workload] = {
    "20 prefixes": prefixes,
    "sessions": sessions,
    "bursts": bursts,
    "one hot prefix": hot,
    "a slow replica": slow,
    "nothing shared": unshared,
}
SLOW = {"a slow replica": 3.0}
"""How many times as long the first replica's steps take."""


# ---- engines without processes


class _Executor:
    """Samples ANSWER for every row at once, and says how long that would have taken.

    last_s, total_s: the last step, and all.
    """

    def __init__(self, costs: CostModel, times: float) -> None:
        self._costs, self._times = costs, times
        self.last_s = self.total_s = 0.0

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        work = [] if output.is_empty else [RowWork(output.start, output.num_new)]
        self.last_s = self._times * float(self._costs.terms_s(work).sum()) if work else 0.0
        self.total_s += self.last_s
        count = len(output.sample_rows)
        sampled = np.full((count, 1), ANSWER, np.int32)
        found: Future[ModelRunnerOutput] = Future()
        found.set_result(ModelRunnerOutput(output.step, sampled, np.ones(count, np.int32), duration_s=self.last_s))
        return found


class _NoRecorder:
    """Lets the engine count the tokens of its steps."""

    def begin_step(self, keys: np.ndarray) -> None: ...

    def end_step(self) -> None: ...


class _Server(EngineServer):
    """Reports its statistics by the virtual clock."""

    executor: _Executor

    def _is_time_for_stats(self) -> bool:
        return self._core.now() - self._stats_at >= STATS_INTERVAL_S

    def _make_stats(self) -> wire.EngineStats:
        stats = super()._make_stats()
        self._stats_at = stats.at_s = self._core.now()
        stats.step_s = self.executor.total_s
        return stats


class _Engine:
    """An engine process that is none: its socket, and its link for a ProcessClient."""

    is_up, is_stuck, is_idle = True, False, False

    def __init__(
        self, clock: VirtualClock, machine: Machine, costs: CostModel, times: float, on_message: Callable[[], object]
    ) -> None:
        options = SchedulerOptions(machine.max_num_seqs, machine.max_batched_tokens, prefix_hash_seed=HASH_SEED)
        cache, length = EngineConfig().cache, machine.max_model_len
        self.scheduler = Scheduler(options, cache, (KVGroupSpec(),), machine.num_blocks, length, clock)
        self.executor = _Executor(costs, times)
        sizes = wire.EngineSizes(length, BLOCK_SIZE, machine.num_blocks, 0)
        recorder: Any = _NoRecorder()
        executor: Any = self.executor
        self.core = EngineCore(self.scheduler, executor, clock, sizes, VOCABULARY, recorder=recorder)
        self.server = _Server(self.core, self, tells_cache=True)  # type: ignore[arg-type]
        self.server.executor = self.executor
        self.received, self.sent = deque[bytes](), list[bytes]()
        self.is_busy = False
        self._on_message = on_message
        self._codec = wire.Codec(wire.ToEngine)

    # its socket

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if not self.received:
            raise zmq.Again
        frame = self.received.popleft()
        return frame if copy else zmq.Frame(frame)

    def send(self, data: bytes | wire.ToEngine) -> None:
        """Of the engine: bytes; of its client: a message."""
        if isinstance(data, bytes):
            self.sent.append(data)
        else:
            self.send_bytes(self._codec.encode(data))

    def send_bytes(self, *frames: bytes) -> None:
        self.received.extend(frames)
        self._on_message()


@dataclass(frozen=True, slots=True)
class Figures:
    """share: of the prompts' tokens, found in caches.   ttft_s: float64 [num_requests]."""

    share: float
    ttft_s: np.ndarray


class Simulation:
    """So many replicas that serve a workload, until all requests have ended."""

    def __init__(
        self,
        num_replicas: int,
        router: type[Router],
        costs: CostModel,
        slow_times: float = 1.0,
        machine: Machine = H100,
    ) -> None:
        """costs: of the machine.   slow_times: as long as others' take the first replica's steps."""
        self.clock = VirtualClock()
        self.replicas = Replicas(
            EngineConfig.from_options(
                distributed_executor_backend="fake",
                data_parallel_size=num_replicas,
                prefix_hash_seed=HASH_SEED,
                block_size=BLOCK_SIZE,
            )
        )
        steps = machine.max_num_seqs, machine.max_batched_tokens
        self.replicas._router = router(*steps, self.replicas._router.costs)
        self.replicas.sinks._sinks[0] = self._take
        self.engines = [
            _Engine(self.clock, machine, costs, times, lambda number=number: self._wake(number))
            for number, times in enumerate([slow_times, *[1.0] * (num_replicas - 1)])
        ]
        self._codec = wire.Codec(wire.FromEngine)
        for one, engine in zip(self.replicas.each, self.engines, strict=True):
            one._supervisor.link = engine  # type: ignore[assignment]
            one._supervisor.process_number = 1
            one.on_ready()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._asked: list[Ask] = []
        self._first_s: list[float] = []

    def run(self, asks: Sequence[Ask]) -> Figures:
        for ask in asks:
            self._at(ask.at_s, lambda ask=ask: self._ask(ask))
        while self._due:
            at_s, _, act = heapq.heappop(self._due)
            self.clock.advance(max(0.0, at_s - self.clock.now()))
            act()
        stats = [engine.scheduler.make_stats() for engine in self.engines]
        share = sum(one.prefix_hits for one in stats) / sum(one.prefix_queries for one in stats)
        return Figures(share, np.array(self._first_s) - [ask.at_s for ask in self._asked])

    def _at(self, at_s: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), act))

    def _ask(self, ask: Ask) -> None:
        handle = len(self._asked)
        self._asked.append(ask)
        self._first_s.append(np.nan)
        sampling = SamplingParams(max_tokens=ask.num_out, ignore_eos=True, temperature=0.0)
        self.replicas.add_request(Request(str(handle), ask.prompt, sampling, handle=handle, arrival_time_s=ask.at_s))

    def _wake(self, number: int) -> None:
        if not self.engines[number].is_busy:
            self.engines[number].is_busy = True
            self._at(self.clock.now(), lambda: self._step(number))

    def _step(self, number: int) -> None:
        engine = self.engines[number]
        engine.server.step()
        self._at(self.clock.now() + max(engine.executor.last_s, 1e-4), lambda: self._end_step(number))

    def _end_step(self, number: int) -> None:
        engine = self.engines[number]
        sent, engine.sent = engine.sent, []
        for data in sent:
            self.replicas.each[number].on_message(self._codec.decode(data))
        engine.is_busy = False
        if engine.received or engine.core.has_unfinished_requests():
            self._wake(number)

    def _take(self, outputs: EngineCoreOutputs | WorkerDied) -> None:
        assert not isinstance(outputs, WorkerDied)
        for handle in outputs.handles.tolist():
            if np.isnan(self._first_s[handle]):
                self._first_s[handle] = self.clock.now()
        for end in outputs.ends:
            assert end.message is None, end.message
            if (following := self._asked[end.handle].then(self.clock.now())) is not None:
                self._at(following.at_s, partial(self._ask, following))


def figures_of(workload: str, policy: str, seed: int, num_replicas: int, costs: CostModel) -> Figures:
    asks = WORKLOADS[workload](np.random.default_rng(seed), num_replicas)
    return Simulation(num_replicas, POLICIES[policy], costs, SLOW.get(workload, 1.0)).run(asks)


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = np.quantile(values, (0.0, 0.5, 1.0))
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def rows(workloads: Sequence[str], policies: Sequence[str], seeds: int, num_replicas: int) -> Iterator[str]:
    """Yield the lines of the table."""
    costs = H100.costs()
    yield "| workload | policy | cached, % | TTFT p50, ms | p99, ms |"
    yield "|---|---|---|---|---|"
    for workload, policy in itertools.product(workloads, policies):
        found = [figures_of(workload, policy, seed, num_replicas, costs) for seed in range(seeds)]
        cells = [
            spread([100 * one.share for one in found], 1),
            *(spread([1e3 * float(np.quantile(one.ttft_s, at)) for one in found], 0) for at in (0.5, 0.99)),
        ]
        yield f"| {workload} | {policy} | {' | '.join(cells)} |"


# ---- what it costs


class _NoEngine:
    """An engine that takes requests and does nothing."""

    is_up, is_stuck, is_idle = True, False, False

    def send(self, message: wire.ToEngine) -> None: ...

    def send_bytes(self, *frames: bytes) -> None: ...


def _us(work: Callable[[], object], count: int) -> float:
    """Return the CPU time of one call, in microseconds: the least of three rounds."""
    rounds: list[float] = []
    for _ in range(3):
        began_s = time.process_time()
        for _ in range(count):
            work()
        rounds.append(time.process_time() - began_s)
    return min(rounds) / count * 1e6


def without_engines(num_replicas: int) -> Replicas:
    replicas = Replicas(
        EngineConfig.from_options(
            distributed_executor_backend="fake",
            data_parallel_size=num_replicas,
            prefix_hash_seed=HASH_SEED,
            block_size=BLOCK_SIZE,
        )
    )
    replicas.sinks._sinks[0] = lambda _: None
    for one in replicas.each:
        link: Any = _NoEngine()
        one._supervisor.link = link
        one._supervisor.process_number = 1
        one.on_ready()
    return replicas


def costs_of_outputs(num_rows: int) -> str:
    """Return a line: microseconds of a step's outputs for so many requests, from the engine's message to the client."""
    replicas = without_engines(1)
    sampling = SamplingParams(max_tokens=9)
    for handle in range(num_rows):
        replicas.add_request(Request("a", np.zeros(500, np.int32), sampling, handle=handle))
    handles, ones = np.arange(num_rows), np.ones(num_rows, np.int32)
    outputs = EngineCoreOutputs(handles=handles, sequences=0 * ones, counts=ones, token_ids=ones)
    data, codec = (
        wire.Codec(wire.ToEngine).encode(wire.StepOutputs({0: outputs}, (num_rows,))),
        wire.Codec(wire.FromEngine),
    )
    return f"| {num_rows} | {_us(lambda: replicas.each[0].on_message(codec.decode(data)), 200):.0f} |"


def costs_of_placing(num_replicas: int, count: int = 50) -> Iterator[str]:
    """Yield lines of a table: microseconds of what is done for each request, by prompt."""
    replicas = without_engines(num_replicas)
    rng, handles = np.random.default_rng(0), itertools.count()
    for num_tokens, holders in ((500, 0), (8_000, 0), (8_000, 1), (8_000, num_replicas), (30_000, num_replicas)):
        prompt = tokens(rng, num_tokens)
        request = Request("a", prompt, SamplingParams(max_tokens=9))
        hashes = (*hashes_of_prompt(request, HASH_SEED, BLOCK_SIZE),)
        for one in replicas.each[:holders]:
            one.on_message(wire.CacheChanges(hashes, ()))

        def place(prompt: np.ndarray = prompt) -> None:
            handle = next(handles)
            replicas.add_request(Request("a", prompt, SamplingParams(max_tokens=9), handle=handle))
            replicas.abort([handle])

        all_us = _us(place, count)
        find = partial(replicas._prefixes.num_leading, hashes, range(num_replicas))
        hashing_us = _us(lambda request=request: deque(hashes_of_prompt(request, HASH_SEED, BLOCK_SIZE), 0), count)
        choose = partial(
            replicas._router.choose, num_tokens, 1, [one.load for one in replicas.each], [0] * num_replicas
        )
        parts = (all_us, hashing_us if holders else 0.0, _us(find, count), _us(choose, count))
        yield f"| {num_replicas} | {num_tokens:,} | {holders} | {' | '.join(f'{us:,.0f}' for us in parts)} |"


def costs_of_changes(num_replicas: int, num_blocks: int = 500) -> str:
    """Return a line: microseconds per block that a replica's cache has stored or removed, and bytes of the index."""
    index = PrefixIndex()
    hashes = [number.to_bytes(32, "big") for number in range(num_blocks)]

    def change() -> None:
        for replica in range(0, num_replicas, max(1, num_replicas // 8)):
            index.change(replica, hashes, ())
        for replica in range(0, num_replicas, max(1, num_replicas // 8)):
            index.change(replica, (), hashes)

    num_changes = 2 * len(range(0, num_replicas, max(1, num_replicas // 8))) * num_blocks
    change_us = _us(change, 5) / num_changes
    index.change(num_replicas - 1, hashes, ())
    holders = index._holders
    num_bytes = sys.getsizeof(holders) + sum(sys.getsizeof(one) + sys.getsizeof(held) for one, held in holders.items())
    return f"| {num_replicas} | {change_us:.2f} | {num_bytes / num_blocks:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--costs", action="store_true", help="CPU time of placing requests, by number of replicas")
    args = parser.parse_args()
    if args.costs:
        print("| replicas | tokens | replicas that have them | request, us | hashing | index | choice |")
        print("|---|---|---|---|---|---|---|")
        for num_replicas in (8, 64, 1000):
            for line in costs_of_placing(num_replicas):
                print(line, flush=True)
        print("\n| replicas | us per changed block | bytes per block |\n|---|---|---|")
        for num_replicas in (8, 64, 1000):
            print(costs_of_changes(num_replicas), flush=True)
        print("\n| rows | us per step |\n|---|---|")
        for num_rows in (1, 32, 256):
            print(costs_of_outputs(num_rows), flush=True)
        return
    for line in rows(args.workload or [*WORKLOADS], args.policy or [*POLICIES], args.seeds, args.replicas):
        print(line, flush=True)


if __name__ == "__main__":
    main()
