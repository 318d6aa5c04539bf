"""Ranks that are threads of one process: each has a tree of its own, and computes its share with the others."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from pagoda.kernels.collectives.group import Communicator, ThreadGroup, thread_groups
from pagoda.kernels.collectives.shared_memory import shared_groups
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.loading.adapters.files import AdapterTargets
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.worker.adapters import AdapterLimits, AdapterStore
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.device_under_test import ON_CPU

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's model, with adapters in its store."""

    forward: ForwardRunner
    store: AdapterStore
    ops: Ops


def on_ranks(
    size: int,
    files: ModelFiles,
    compute: Callable[[Rank], ResultT],
    kernels: str = "torch",
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
) -> list[ResultT]:
    """Return what each of the ranks computes.

    kernels: "native" records forwards and meets in shared memory; others run op by op and meet in thread_groups.
    """
    all_ops = [ON_CPU.ops(kernels) for _ in range(size)]
    first = all_ops[0]
    groups = shared_groups(first.library, size, deadline_s=60) if isinstance(first, NativeOps) else thread_groups(size)

    def run(ops: Ops, ranks: Communicator) -> ResultT:
        with torch.inference_mode():
            try:
                return compute(load_rank(files, ops, ranks, dtype, quantization))
            except BaseException as error:
                if isinstance(ranks, ThreadGroup):
                    ranks.abort(repr(error))
                raise

    with ThreadPoolExecutor(size) as threads:
        done = [threads.submit(run, ops, ranks) for ops, ranks in zip(all_ops, groups, strict=True)]
        errors = [error for one in done if (error := one.exception()) is not None]
        # The others have died of the first error.
        if errors:
            raise next((error for error in errors if type(error).__name__ != "WorkerDied"), errors[0])
        return [one.result() for one in done]


def load_rank(files: ModelFiles, ops: Ops, ranks: Communicator, dtype: torch.dtype, quantization: str | None) -> Rank:
    device = torch.device("cpu")
    model = load_model(files, ops, dtype, device, quantization, ranks=ranks)
    targets = AdapterTargets(read_architecture(files)[0], model)
    store = AdapterStore(model, targets, ops, dtype, device, AdapterLimits(8, 256))
    recorder = Programs(ops, store.tables) if isinstance(ops, NativeOps) else None
    return Rank(ForwardRunner(model, ops, device, store.tables, recorder), store, ops)


def recorded(rank: Rank) -> bool:
    """Whether all that a rank has computed was recorded."""
    recorder = rank.forward.recorder
    return isinstance(recorder, Programs) and None not in recorder._programs.values()
