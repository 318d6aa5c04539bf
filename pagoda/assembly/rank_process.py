"""A rank's process, with a worker of the settings: a module that `LocalRanks` starts."""

import dataclasses
import os

from pagoda.assembly.engine_setup import options_of, resolve_engine
from pagoda.assembly.identity import digest_of, kernels_of
from pagoda.assembly.worker_setup import make_worker
from pagoda.executors.in_process import InProcessExecutor
from pagoda.executors.messages import Identity, RankStart
from pagoda.executors.rank import run_child
from pagoda.kernels.native import library
from pagoda.kernels.native.threads import bind_to_cores
from pagoda.layers.sharding import ALONE
from pagoda.ops.tensor import RankGroup


def make_executor(start: RankStart) -> tuple[InProcessExecutor, Identity]:
    """Return the executor of this rank's worker, and what must be the same on all ranks."""
    parallel = start.config.parallel
    if parallel.threads is None:
        parallel = dataclasses.replace(parallel, threads=bind_to_cores(start.local_number, start.num_local))
    setup = resolve_engine(dataclasses.replace(start.config, parallel=parallel))
    overlap = options_of(setup).pipeline_depth > 1 and not setup.device.is_host
    worker = make_worker(setup, True, start.place, _group_of(start), start.local_number)
    return InProcessExecutor(worker, overlap), Identity(digest_of(setup), kernels_of(setup))


def _group_of(start: RankStart) -> RankGroup:
    """Return the ranks that this one computes with."""
    if start.segment is None:
        return ALONE
    # Imported here because torch takes a second to import, and a rank without a model needs none of this.
    from pagoda.kernels.collectives.shared_memory import SharedGroup

    try:
        return SharedGroup(library.load(), start.segment, start.place, previous=start.previous, next=start.next)
    finally:
        os.close(start.segment)  # it has been mapped


def main() -> None:
    """Be the rank that standard input says, until that closes."""
    run_child(make_executor)
