"""Collectives: sums and gathers in the order of the ranks, activations from stage to stage, and what ends them."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import pytest
import torch

from pagoda.base.errors import WorkerDied
from pagoda.kernels.collectives.group import RankGroup, thread_groups
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps

ResultT = TypeVar("ResultT")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


def on_threads(groups: Sequence[RankGroup], body: Callable[[RankGroup], ResultT]) -> list[ResultT | WorkerDied]:
    """Run `body` with every group, each in a thread; return its results, or the WorkerDied that it raised."""
    results: dict[int, ResultT | WorkerDied] = {}

    def run(index: int, group: RankGroup) -> None:
        try:
            results[index] = body(group)
        except WorkerDied as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == len(groups), "a rank hangs"
    return [results[index] for index in range(len(groups))]


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@DTYPES
@SIZES
def test_a_sum_is_in_float32_in_the_order_of_the_ranks(size: int, dtype: torch.dtype) -> None:
    ops = cast(Ops, ReferenceOps())
    sums = on_threads(thread_groups(size), lambda group: ops.all_reduce(part(group.rank, 3, 33, dtype=dtype), group))
    wanted = part(0, 3, 33, dtype=dtype).float()
    for rank in range(1, size):
        wanted += part(rank, 3, 33, dtype=dtype).float()
    for total in sums:
        assert isinstance(total, torch.Tensor)
        assert total.dtype == dtype
        assert total.equal(wanted.to(dtype))


@DTYPES
def test_a_gather_joins_columns_of_different_numbers(dtype: torch.dtype) -> None:
    ops = cast(Ops, ReferenceOps())
    parts = [part(rank, 5, 7 + 3 * rank, dtype=dtype) for rank in range(3)]
    for whole in on_threads(thread_groups(3), lambda group: ops.all_gather(parts[group.rank], 30, group)):
        assert isinstance(whole, torch.Tensor)
        assert whole.equal(torch.cat(parts, dim=1))


def test_a_stage_receives_what_the_same_rank_of_the_stage_before_sent() -> None:
    groups = thread_groups(2, num_stages=2)

    def body(group: RankGroup) -> torch.Tensor | None:
        if group in groups[:2]:
            for step in range(3):
                group.send(part(10 * group.rank + step, 4, 8))
            return None
        received = torch.empty(3, 4, 8)
        for step in range(3):
            group.receive(received[step])
        return received

    for rank, received in enumerate(on_threads(groups, body)[2:]):
        assert isinstance(received, torch.Tensor)
        assert received.equal(torch.stack([part(10 * rank + step, 4, 8) for step in range(3)]))


def test_a_rank_that_aborts_ends_the_others() -> None:
    ops = cast(Ops, ReferenceOps())

    def body(group: RankGroup) -> object:
        if group.rank == 1:
            group.abort("out of memory")
        return ops.all_reduce(torch.ones(2, 4), group)

    for died in on_threads(thread_groups(3), body):
        assert isinstance(died, WorkerDied)
        assert "out of memory" in str(died)


def test_a_rank_that_does_not_come_ends_the_others_after_the_deadline() -> None:
    ops = cast(Ops, ReferenceOps())
    groups = thread_groups(2, deadline_s=0.2)
    (died,) = on_threads(groups[:1], lambda group: ops.all_reduce(torch.ones(2, 4), group))
    assert isinstance(died, WorkerDied)
    assert "rank 0 of 2: waited 0.2 s for the other ranks" in str(died)
