"""ThreadRanks: an executor whose ranks are threads of this process, so that a test can look into all of them."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pagoda.assembly.engine_setup import EngineSetup
from pagoda.assembly.worker_setup import make_worker
from pagoda.base.errors import InvariantBroken
from pagoda.base.ranks import RankPlace
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.executors.in_process import InProcessExecutor
from pagoda.kernels.collectives.shared_memory import shared_groups
from pagoda.kernels.native import library
from pagoda.worker.calls import Capacity, StepSize
from pagoda.worker.worker import Worker


class ThreadRanks:
    """See engine.executor.Executor. Every rank is an executor of its own; a step is done when all ranks have done it.

    workers: of all ranks.   sampling: the one that samples.
    """

    def __init__(self, setup: EngineSetup) -> None:
        parallel = setup.config.parallel
        size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        places = [RankPlace.of(number, size, stages) for number in range(parallel.world_size)]
        groups = shared_groups(library.load(), size, stages, deadline_s=60)
        self.workers: list[Worker] = [
            make_worker(setup, False, place, group) for place, group in zip(places, groups, strict=True)
        ]
        self._ranks = [InProcessExecutor(worker, overlap=True) for worker in self.workers]
        self._sampling = next(place.number for place in places if place.samples)
        self.sampling = self.workers[self._sampling]

    def start(self, sizes: Sequence[StepSize] = ()) -> Sequence[Capacity]:
        return [capacity for rank in self._ranks for capacity in rank.start(sizes)]

    def set_pools(self, *counts: int) -> None:
        """On all ranks at once: their first step is computed together."""
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            for done in [threads.submit(rank.set_pools, *counts) for rank in self._ranks]:
                done.result()

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        return self._of_all([rank.submit(output) for rank in self._ranks], _check_step)

    def call(self, name: str, *args: object) -> "Future[Any]":
        return self._of_all([rank.call(name, *args) for rank in self._ranks], lambda results: None)

    def _of_all(self, futures: "list[Future[Any]]", check: Callable[[list[Any]], None]) -> "Future[Any]":
        """Return the future of the sampling rank's result, which is there when all ranks have theirs."""
        together: Future[Any] = Future()
        left, lock = len(futures), threading.Lock()

        def one_more(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            try:
                results = [future.result() for future in futures]
                check(results)
            except Exception as error:
                together.set_exception(error)
            else:
                together.set_result(results[self._sampling])

        for future in futures:
            future.add_done_callback(one_more)
        return together

    def shutdown(self) -> None:
        for rank in self._ranks:
            rank.shutdown()


def _check_step(results: list[ModelRunnerOutput]) -> None:
    if len({result.checksum for result in results}) > 1:
        raise InvariantBroken("the ranks disagree about the lengths of the rows")
