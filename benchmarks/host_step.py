#!/usr/bin/env python3
"""What a decode step costs the host that feeds a device. usage: host_step.py [--rows 1 8 64 256] [--steps 300]

The scheduler, the engine loop, the gathering of inputs and the collecting of results are real; the device is made up:
it computes nothing, and its results come one step late, as on a GPU. Not in it: launching kernels or graphs. Prints a
JSON line per number of rows, microseconds per step: of all, and of the worker's part.

With --cpu MS, the device is made up of a CPU's cores: each forward takes so many milliseconds, of cores that are not
this process's, on the thread that runs steps. Prints the microseconds from one forward to the next, with steps one
after the other, and with the next one scheduled meanwhile (async_scheduling), in turns: the first decile of each turn,
which other processes delay least, and the median of these.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from pagoda.base.clock import SystemClock
from pagoda.base.config import CacheConfig
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingPlan
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.kv import KVGroupSpec, KVShape
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.wire import EngineSizes
from pagoda.executors.in_process import InProcessExecutor
from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.calls import Capacity, StepSize
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.forward_runner import Computed, ForwardRunner
from pagoda.worker.launched_steps import LaunchedStep
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.table_mirror import TableMirror

BLOCK, VOCAB, MAX_LEN = 16, 512, 2048


class NoModel:
    """A model that computes nothing: every logit is zero."""

    generates, num_token_types, pooling = True, 0, PoolingPlan()
    kv_groups = (KVGroupSpec(shape=KVShape(1, 1, 1)),)
    spec = ModelSpec("none", VOCAB, 1, 1, 1, 1, 1, 1, MAX_LEN, (0,))


class NoForward(ForwardRunner):
    """Runs it."""

    def __init__(self) -> None:
        super().__init__(cast(Any, NoModel()), cast(Any, TorchOps()))
        self._logits = torch.zeros(1024, VOCAB)
        self.takes_s = 0.0
        self.gaps_s: list[float] = []
        self._ended_s = time.perf_counter()

    def run(self, batch: ForwardBatch, kv: object, size: object = None) -> Computed:
        if self.takes_s:
            self.gaps_s.append(time.perf_counter() - self._ended_s)
            time.sleep(self.takes_s)
            self._ended_s = time.perf_counter()
        return Computed(self._logits[: batch.outputs.index.shape[0]], self._logits[: batch.logits_index.shape[0]])


class TimedWorker:
    """Launches steps; notes how long the host spends in it."""

    def __init__(self, max_rows: int) -> None:
        cpu = CpuDevice()
        cache = CacheEngine(NoModel.kv_groups, BLOCK, 1, 0, torch.float32, cpu)
        table = TableMirror(max_rows, MAX_LEN, BLOCK, 1)
        self.forward = NoForward()
        self._runner = ModelRunner(self.forward, table, cache, cpu)
        self.seconds = 0.0

    def load(self) -> None:
        torch.set_num_threads(1)

    def measure(self, sizes: Sequence[StepSize]) -> Capacity:
        return Capacity("host", 0, 0)

    def set_pools(self, *counts: int) -> None:
        pass

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        begin = time.perf_counter()
        step = self._runner.launch(output)
        step.result()
        self.seconds += time.perf_counter() - begin
        return step

    def call(self, name: str, args: Sequence[object]) -> object:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


def measure(num_rows: int, num_steps: int, forward_s: float = 0.0, is_async: bool = True) -> dict[str, float]:
    """Decode `num_rows` requests for `num_steps` steps after all of their prompts.

    forward_s: that a forward takes, beside this thread if `is_async`.
    """
    depth = 2 if is_async else 1
    options = SchedulerOptions(
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(2048, num_rows),
        pipeline_depth=depth,
        async_scheduling=is_async,
    )
    worker = TimedWorker(options.max_rows)
    executor = InProcessExecutor(worker, overlap=is_async and forward_s > 0)  # type: ignore[arg-type]
    executor.start()
    num_blocks = num_rows * (MAX_LEN // BLOCK) + 1
    executor.set_pools(num_blocks, 0)
    clock = SystemClock()
    scheduler = Scheduler(options, CacheConfig(block_size=BLOCK), NoModel.kv_groups, num_blocks, MAX_LEN, clock)
    core = EngineCore(scheduler, executor, clock, EngineSizes(MAX_LEN, BLOCK, num_blocks, 0), VOCAB, depth)
    for number in range(num_rows):
        params = SamplingParams(temperature=0, max_tokens=MAX_LEN - 64, ignore_eos=True)
        prompt = np.random.default_rng(number).integers(0, VOCAB, 24).astype(np.int32)
        core.add_request(Request(f"r{number}", prompt, params, handle=number, seed=number, arrival_time_s=core.now()))
    for _ in range(40 + num_rows // 40):
        core.step()
    worker.forward.takes_s = forward_s
    worker.seconds, begin = 0.0, time.perf_counter()
    for _ in range(num_steps):
        core.step()
    whole = time.perf_counter() - begin
    core.shutdown()
    found = {"rows": num_rows, "step_us": 1e6 * whole / num_steps, "worker_us": 1e6 * worker.seconds / num_steps}
    if forward_s:
        found["gap_us"] = 1e6 * statistics.quantiles(worker.forward.gaps_s[2:], n=10)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cpu", type=float, metavar="MS", help="milliseconds of a forward")
    parser.add_argument("--rounds", type=int, default=5, help="with --cpu")
    given = parser.parse_args()
    for rows in given.rows:
        if given.cpu is None:
            print(json.dumps(measure(rows, given.steps)))
            continue
        turns = [
            [measure(rows, given.steps, given.cpu / 1e3, is_async)["gap_us"] for is_async in (False, True)]
            for _ in range(given.rounds)
        ]
        in_turn, overlapped = (round(statistics.median(gaps)) for gaps in zip(*turns, strict=True))
        print(json.dumps({"rows": rows, "forward_ms": given.cpu, "gap_us": in_turn, "gap_async_us": overlapped}))


if __name__ == "__main__":
    main()
