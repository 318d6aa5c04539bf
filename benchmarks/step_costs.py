#!/usr/bin/env python3
"""How well the scheduler's cost model knows what steps take, and whether it swaps when that is cheaper.

usage: step_costs.py [--steps 600] [--cpu-time] [--out FILE] [any flag of `pagoda generate`]

errors: random traffic of mixed lengths. Each step is predicted before it is measured; the steps are grouped by the term
    that is largest in the prediction. In percent of the measured time: the median error and the 90th percentile, how
    much the sum of the predictions is off, and `spread`, the median difference of the same step in a second run.
cases: a request loses its place to a more urgent one, and comes back. Computing it again and copying its blocks out
    and in are both measured (the fastest of three), next to what the model, fitted to the traffic, says of them. In
    the last ones, another running request has the same first tokens, so that the prefix cache gives them back.
"""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pagoda.base.outputs import RequestOutputKind
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.options import engine_options
from pagoda.core.cost_model import TERMS, CostModel, RowWork
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.executor import Executor
from pagoda.worker.calls import Capacity, StepSize

if TYPE_CHECKING:
    from pagoda.engine.text_engine import TextEngine

_WARM_UP = 100  # steps after which predictions count
_CASES = (8, 32, 128, 512, 1500)
_SHARED = ((512, 256), (1500, 1024), (1500, 1488))  # tokens, and how many of them another request has, too

Step = tuple[SchedulerOutput, ModelRunnerOutput]


class StepLog:
    """Keeps the steps that `inner` runs, with their results.

    cpu_time: replace their duration by the CPU time of this process; for one thread, on a machine that is not idle.
    """

    def __init__(self, inner: Executor, *, cpu_time: bool) -> None:
        self._inner = inner
        self._cpu_time = cpu_time
        self.steps: list[Step] = []

    def start(self, sizes: Sequence[StepSize] = ()) -> Sequence[Capacity]:
        return self._inner.start(sizes)

    def set_pools(self, *counts: int) -> None:
        self._inner.set_pools(*counts)

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        begin_s = time.process_time()
        future = self._inner.submit(output)
        result = future.result()
        if self._cpu_time:
            result = replace(result, duration_s=time.process_time() - begin_s)
        self.steps.append((output, result))
        return future

    def call(self, name: str, *args: object) -> "Future[Any]":
        return self._inner.call(name, *args)

    def shutdown(self) -> None:
        self._inner.shutdown()


def build(options: dict[str, object], *, cpu_time: bool) -> tuple["TextEngine", StepLog]:
    """Return an engine that plans a step when the one before is done, and the log of its steps."""
    from pagoda.assembly.assemble import build_llm_engine
    from pagoda.base.config import EngineConfig

    logs: list[StepLog] = []

    def wrap(inner: Executor, _: int) -> Executor:
        logs.append(StepLog(inner, cpu_time=cpu_time))
        return logs[0]

    given = {"enable_prefix_caching": False, "async_scheduling": False, **options}
    engine = build_llm_engine(EngineConfig.for_engine(**given), wrap_executor=wrap)
    add(engine, "warm", 200, 4)
    finish(engine)
    logs[0].steps.clear()
    return engine, logs[0]


def add(
    engine: "TextEngine",
    name: str,
    num_prompt: int,
    max_tokens: int,
    priority: int = 0,
    begin: tuple[str, int] = ("", 0),
) -> None:
    """begin: a name, and how many tokens of its prompt this one begins with."""
    texts = ((random.Random(begin[0]), begin[1]), (random.Random(name), num_prompt - begin[1]))
    tokens = [rng.randrange(1000, 40_000) for rng, count in texts for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    engine.add(engine.prepare(name, tokens, params, priority=priority), RequestOutputKind.FINAL_ONLY)


def finish(engine: "TextEngine") -> None:
    while engine.has_unfinished_requests():
        engine.step()


def run_traffic(engine: "TextEngine", log: StepLog, num_steps: int) -> list[Step]:
    """Run random requests: most are short, some have long prompts; between 1 and 24 at once. Return the steps."""
    rng = random.Random(7)
    at_once, submitted, running = 4, 0, 0
    for step in range(num_steps):
        if step % 60 == 0:
            at_once = rng.choice((1, 2, 4, 8, 16, 24))
        while running < at_once:
            num_prompt = min(int(rng.lognormvariate(4.5, 1.3)) + 1, 1500)
            add(engine, f"traffic{submitted}", num_prompt, rng.randrange(4, 120))
            submitted, running = submitted + 1, running + 1
        running -= sum(output.finished for output in engine.step())
    finish(engine)
    steps = log.steps.copy()
    log.steps.clear()
    return [step for step in steps if not step[0].is_empty]


def compute_s(result: ModelRunnerOutput) -> float:
    return result.duration_s - result.swap_s


def predict(steps: list[Step]) -> tuple[CostModel, np.ndarray]:
    """Return the model, fitted to all steps, and the seconds of each term that it predicted for each step before."""
    costs, terms = CostModel(), np.zeros((len(steps), len(TERMS)))
    for number, (output, result) in enumerate(steps):
        if number >= _WARM_UP:
            terms[number] = costs.terms_s([RowWork(output.start, output.num_new)])[0]
        costs.observe(output, result)
    return costs, terms


def print_errors(terms: np.ndarray, measured: np.ndarray, again: np.ndarray) -> None:
    """Print the errors, by the largest term of the steps. measured, again: seconds of each step in two runs."""
    predicted, largest = terms.sum(axis=1), terms.argmax(axis=1)
    errors, spread = 100 * np.abs(predicted / measured - 1), 100 * np.abs(again / measured - 1)
    print(f"{'largest term':16} {'steps':>6} {'share':>6} {'median':>7} {'p90':>6} {'sum':>6} {'spread':>7}")
    for number, name in enumerate(("all", *TERMS)):
        of_term = largest == number - 1 if number else np.ones(len(errors), bool)
        share = 100 * (terms[:, number - 1].sum() / terms.sum() if number else 1.0)
        line = f"{name:16} {of_term.sum():6} {share:6.1f}"
        if of_term.any():
            middle, high = np.percentile(errors[of_term], (50, 90))
            off = 100 * (predicted[of_term].sum() / measured[of_term].sum() - 1)
            line += f" {middle:7.1f} {high:6.1f} {off:6.1f} {np.median(spread[of_term]):7.1f}"
        print(line)


def measure_case(engine: "TextEngine", log: StepLog, name: str, num_tokens: int) -> tuple[float, float, int]:
    """Let a request lose its place and come back. Return seconds of computing it again, of copies, and its blocks.

    The engine runs one request at a time. A step that computes it again also decodes, which does not count.
    """
    log.steps.clear()
    add(engine, f"{name} long", num_tokens, 8, priority=2)
    while len(log.steps) < 3 or any(output.num_new.max() > 1 for output, _ in log.steps[-3:]):
        engine.step()
    decode_s = min(compute_s(result) for _, result in log.steps[-3:])
    first = len(log.steps)
    add(engine, f"{name} urgent", 1, 1, priority=1)
    finish(engine)
    returned = log.steps[first:]
    again = [result for output, result in returned if (output.num_new > 1).any()]
    computed_s = sum(compute_s(result) - decode_s for result in again)
    return computed_s, sum(result.swap_s for _, result in returned), sum(len(output.swap_out) for output, _ in returned)


def measure_shared(engine: "TextEngine", log: StepLog, name: str, num_tokens: int, num_shared: int) -> float:
    """Return the seconds of computing a prompt of which another running request has the first tokens."""
    add(engine, f"{name} other", num_shared + 1, 16, begin=(name, num_shared))
    for _ in range(4):
        engine.step()
    decode_s = min(compute_s(result) for _, result in log.steps[-3:])
    log.steps.clear()
    add(engine, f"{name} long", num_tokens, 1, begin=(name, num_shared))
    finish(engine)
    prompts = [(output, result) for output, result in log.steps if output.num_new.size and output.num_new.max() > 1]
    assert sum(int(output.num_new.max()) for output, _ in prompts) == num_tokens - num_shared, (
        "the prefix was not found"
    )
    return sum(compute_s(result) - decode_s for _, result in prompts)


def print_cases(options: dict[str, object], costs: CostModel, *, cpu_time: bool) -> None:
    of_cases = {"max_num_seqs": 1, "scheduling_policy": "priority", "evict_for_priority": True, "swap_space": 1.0}
    fastest: dict[str, dict[int, tuple[float, float, int]]] = {}
    for mode in ("recompute", "swap"):
        engine, log = build({**options, **of_cases, "preemption_mode": mode}, cpu_time=cpu_time)
        for num_tokens in _CASES:
            runs = [measure_case(engine, log, f"{mode} {num_tokens} {number}", num_tokens) for number in range(3)]
            fastest.setdefault(mode, {})[num_tokens] = min(runs)
            for output, result in log.steps:  # of the last run: its copies
                costs.observe(output, result)
        engine.shutdown()
    engine, log = build({**options, "max_num_seqs": 2, "enable_prefix_caching": True}, cpu_time=cpu_time)
    computed = {(num_tokens, 0): fastest["recompute"][num_tokens][0] for num_tokens in _CASES}
    for case in _SHARED:
        computed[case] = min(measure_shared(engine, log, f"shared {case} {number}", *case) for number in range(3))
    engine.shutdown()
    print(f"{'tokens':>6} {'shared':>6} {'compute':>9} {'predicted':>9} {'copies':>9} {'predicted':>9}  in ms")
    for (num_tokens, num_shared), computed_s in computed.items():
        copied_s, num_blocks = fastest["swap"][num_tokens][1:]
        lost = RowWork(np.array([num_shared], np.int32), np.array([num_tokens + 2 - num_shared], np.int32))
        figures = (computed_s, costs.added_s(lost), copied_s, 2 * num_blocks * costs.copy_s_per_block)
        says = "swap" if costs.swap_is_cheaper(lost, num_blocks) else "recompute"
        print(f"{num_tokens:6} {num_shared:6}", *(f"{1e3 * seconds:9.2f}" for seconds in figures), says)


@engine_options()
def main(
    options: dict[str, object],
    steps: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Steps of random traffic.")] = 600,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Measure CPU time, with --threads 1, on a busy machine.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the measured steps, as JSON lines.")] = None,
) -> None:
    """How well the scheduler's cost model knows what steps take."""
    engine, log = build(options, cpu_time=cpu_time)
    traffic, again = (run_traffic(engine, log, steps) for _ in range(2))
    engine.shutdown()
    costs, terms = predict(traffic)
    measured, second = (np.array([compute_s(result) for _, result in run]) for run in (traffic, again))
    print_errors(terms[_WARM_UP:], measured[_WARM_UP:], second[_WARM_UP:])
    if out is not None:
        lines = (
            {"start": output.start.tolist(), "num_new": output.num_new.tolist(), "compute_s": compute_s(result)}
            for output, result in traffic
        )
        out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_cases(options, costs, cpu_time=cpu_time)


if __name__ == "__main__":
    typer.run(main)
