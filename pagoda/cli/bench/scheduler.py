"""`pagoda bench scheduler`: what planning a step costs, without a model. Only decisions are timed."""

import json
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer

from pagoda.base.clock import SystemClock
from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
MAX_BATCHED_TOKENS = 8192
VOCABULARY = 49_000
NUM_SEQS = (8, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class SchedulerFigures:
    """One case. Medians over decode steps in which every sequence runs, in microseconds."""

    engine: str
    num_seqs: int
    prefix_caching: bool
    schedule_us: float
    update_us: float
    per_seq_us: float
    add_request_us: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Cost of a step with 64 running and `num_waiting` waiting sequences, in a pool of `num_blocks` blocks."""

    num_waiting: int
    num_blocks: int
    construct_ms: float
    add_request_us: float
    step_us: float


@dataclass(frozen=True, slots=True)
class AdmissionFigures:
    """Many short requests (32 tokens, then 4 more), of which `num_seqs` run at once: CPU time per request.

    request_us: planning and applying all steps, from its admission to its end.
    """

    num_seqs: int
    prefix_caching: bool
    add_request_us: float
    request_us: float


def bench_scheduler(
    num_seqs: Annotated[list[int] | None, typer.Option(help="Running sequences. May be repeated.")] = None,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 512,
    steps: Annotated[int, typer.Option(help="Decode steps timed in each case.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per case.")] = False,
    events: Annotated[bool, typer.Option("--events", help="Read every event, those of the prefix cache too.")] = False,
    curves: Annotated[
        bool, typer.Option(help="Measure the cost by number of waiting requests and by pool size instead.")
    ] = False,
    admission: Annotated[
        bool, typer.Option(help="Measure requests that come and go, four decode steps each, instead of decode steps.")
    ] = False,
) -> None:
    """Time the scheduler alone: schedule + update_from_output per decode step, and add_request."""
    if curves:
        for point in measure_curves():
            print(json.dumps(asdict(point)) if as_json else _curve_line(point), flush=True)
        return
    for size in num_seqs or NUM_SEQS:
        for caching in (False, True):
            if admission:
                busy = measure_admission(size, caching, reads_events=events)
                print(json.dumps(asdict(busy)) if as_json else _admission_line(busy), flush=True)
                continue
            figures = measure(size, caching, prompt, steps, reads_events=events)
            print(json.dumps(asdict(figures)) if as_json else _line(figures), flush=True)


def measure(
    num_seqs: int, caching: bool, prompt: int = 512, steps: int = 60, *, reads_events: bool = False
) -> SchedulerFigures:
    """Fill a scheduler with `num_seqs` requests of `prompt` random tokens; time `steps` steps in which all decode.

    reads_events: a reader takes every event.
    """
    # The first sequences decode before the last prompt is computed: their blocks must last for those steps, too.
    filling = -(-num_seqs * prompt // (MAX_BATCHED_TOKENS - num_seqs)) + 2
    num_blocks = num_seqs * ((prompt + steps + filling) // BLOCK_SIZE + 3) + 16
    scheduler = make_scheduler(num_seqs, num_blocks, caching)
    if reads_events:
        scheduler.subscribe(deque[object](maxlen=10_000).append, cache=True)
    generator = random.Random(0)
    requests = [make_request(number, prompt, generator) for number in range(num_seqs)]
    started = time.perf_counter()
    for request in requests:
        scheduler.add_request(request)
    add_us = (time.perf_counter() - started) / num_seqs * 1e6
    schedule_s: list[float] = []
    update_s: list[float] = []
    while len(schedule_s) < steps:
        output, of_schedule_s, of_update_s = timed_step(scheduler)
        if output.total_num_scheduled_tokens == len(output.rows) == num_seqs:
            schedule_s.append(of_schedule_s)
            update_s.append(of_update_s)
    schedule_us, update_us = float(np.median(schedule_s)) * 1e6, float(np.median(update_s)) * 1e6
    return SchedulerFigures(
        "pagoda-scheduler",
        num_seqs,
        caching,
        round(schedule_us, 1),
        round(update_us, 1),
        round((schedule_us + update_us) / num_seqs, 3),
        round(add_us, 1),
    )


def measure_admission(
    num_seqs: int, caching: bool, num_requests: int = 4096, *, reads_events: bool = False
) -> AdmissionFigures:
    """Let `num_requests` short requests wait, and serve them `num_seqs` at a time.   reads_events: as in `measure`."""
    scheduler = make_scheduler(num_seqs, num_seqs * 4 + 16, caching)
    if reads_events:
        scheduler.subscribe(deque[object](maxlen=10_000).append, cache=True)
    generator = random.Random(0)
    requests = [make_request(number, 32, generator, max_tokens=4) for number in range(num_requests)]
    began = time.thread_time()
    for request in requests:
        scheduler.add_request(request)
    added = time.thread_time()
    while scheduler.has_unfinished_requests():
        timed_step(scheduler)
    times = (added - began, time.thread_time() - added)
    return AdmissionFigures(num_seqs, caching, *(round(one / num_requests * 1e6, 1) for one in times))


def make_scheduler(num_seqs: int, num_blocks: int, caching: bool) -> Scheduler:
    """A scheduler for one full-attention model."""
    config = SchedulerOptions(max_num_seqs=num_seqs, max_num_batched_tokens=MAX_BATCHED_TOKENS)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching, watermark=0.0)
    return Scheduler(config, cache, (KVGroupSpec(),), num_blocks, MAX_MODEL_LEN, SystemClock())


def make_request(number: int, num_tokens: int, generator: random.Random, max_tokens: int = 100_000) -> Request:
    """A request that ends for its length only."""
    tokens = np.array([generator.randrange(VOCABULARY) for _ in range(num_tokens)], np.int32)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return Request(str(number), tokens, sampling, handle=number, arrival_time_s=float(number))


def made_up(output: SchedulerOutput) -> ModelRunnerOutput:
    """Return a result in which every row samples the same token."""
    count = len(output.sample_rows)
    return ModelRunnerOutput(output.step, np.full((count, 1), 7, np.int32), np.ones(count, np.int32))


def timed_step(scheduler: Scheduler) -> tuple[SchedulerOutput, float, float]:
    """Run a step; return what it scheduled, and the seconds that `schedule` and `update_from_output` took."""
    before = time.perf_counter()
    output = scheduler.schedule()
    planned = time.perf_counter()
    result = made_up(output)
    received = time.perf_counter()
    scheduler.update_from_output(output, result)
    return output, planned - before, time.perf_counter() - received


def measure_curves(
    waiting: tuple[int, ...] = (0, 1_000, 10_000, 100_000),
    pools: tuple[int, ...] = (10_000, 100_000, 1_000_000, 4_000_000),
    num_running: int = 64,
    steps: int = 200,
) -> Iterator[CurvePoint]:
    """Time decode steps of a full batch: first over the number of waiting requests, then over the size of the pool."""
    cases = [(count, 10_000) for count in waiting] + [(0, blocks) for blocks in pools]
    for num_waiting, num_blocks in cases:
        yield _measure_point(num_waiting, num_blocks, num_running, steps)


def _measure_point(num_waiting: int, num_blocks: int, num_running: int, steps: int) -> CurvePoint:
    generator = random.Random(0)
    requests = [make_request(number, 32, generator) for number in range(num_running + num_waiting)]
    started = time.perf_counter()
    scheduler = make_scheduler(num_running, num_blocks, caching=True)
    constructed = time.perf_counter()
    for request in requests:
        scheduler.add_request(request)
    added = time.perf_counter()
    times = [sum(timed_step(scheduler)[1:]) for _ in range(steps + 2)]
    return CurvePoint(
        num_waiting,
        num_blocks,
        round((constructed - started) * 1e3, 2),
        round((added - constructed) / len(requests) * 1e6, 2),
        round(float(np.median(times[2:])) * 1e6, 2),
    )


def _line(figures: SchedulerFigures) -> str:
    caching = "on " if figures.prefix_caching else "off"
    return (
        f"{figures.num_seqs:5d} sequences, prefix caching {caching}: schedule {figures.schedule_us:7.1f} us, "
        f"update {figures.update_us:7.1f} us, {figures.per_seq_us:.3f} us per sequence, "
        f"add_request {figures.add_request_us:.1f} us"
    )


def _curve_line(point: CurvePoint) -> str:
    return (
        f"{point.num_waiting:7d} waiting, {point.num_blocks:8d} blocks: made in {point.construct_ms:.1f} ms, "
        f"add_request {point.add_request_us:.1f} us, step {point.step_us:.1f} us"
    )


def _admission_line(figures: AdmissionFigures) -> str:
    caching = "on " if figures.prefix_caching else "off"
    return (
        f"{figures.num_seqs:5d} sequences, prefix caching {caching}: add_request {figures.add_request_us:.1f} us, "
        f"the rest of a request {figures.request_us:.1f} us"
    )
