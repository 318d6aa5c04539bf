"""Collectives: sums and gathers in the order of the ranks, activations from stage to stage, and what ends them."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import pytest
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.ranks import RankPlace
from pagoda.kernels.batch import ForwardBatch, OutputRows
from pagoda.kernels.collectives.group import Communicator, ThreadGroup, thread_groups
from pagoda.kernels.collectives.segment import HALF_BYTES, INBOX_BYTES, create_segment
from pagoda.kernels.collectives.shared_memory import SharedGroup, shared_groups
from pagoda.kernels.native.library import NativeLibrary
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.replay.recorder import record_forward

ResultT = TypeVar("ResultT")
MakeGroups = Callable[..., Sequence[Communicator]]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


@pytest.fixture(params=["threads", "shared memory", "native"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ops(implementation: str, request: pytest.FixtureRequest) -> Ops:
    return cast(Ops, request.getfixturevalue("native") if implementation == "native" else ReferenceOps())


@pytest.fixture
def make_groups(implementation: str, request: pytest.FixtureRequest) -> MakeGroups:
    """Ranks as threads of this process. In shared memory they do what ranks in processes do."""
    if implementation == "threads":
        return thread_groups
    library = request.getfixturevalue("native").library
    return lambda *args, **kwargs: shared_groups(library, *args, **kwargs)


def on_threads(groups: Sequence[Communicator], body: Callable[[Communicator], ResultT]) -> list[ResultT | Exception]:
    """Run `body` with every group, each in a thread; return its results, or what it raised."""
    results: dict[int, ResultT | Exception] = {}

    def run(index: int, group: Communicator) -> None:
        try:
            results[index] = body(group)
        except Exception as error:
            results[index] = error
            if isinstance(group, ThreadGroup):
                group.abort(str(error))

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == len(groups), "a rank hangs"
    return [results[index] for index in range(len(groups))]


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


# One element, a share that is no multiple of the vectors, what each rank sums a share of, and more than one chunk.
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (5, 3, 16), (97, 251), (3, HALF_BYTES // 4 - 5)])
@DTYPES
@SIZES
def test_a_sum_is_in_float32_in_the_order_of_the_ranks(
    make_groups: MakeGroups, ops: Ops, size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    parts = [part(rank, *shape, dtype=dtype) for rank in range(size)]
    wanted = parts[0].float()
    for other in parts[1:]:
        wanted = wanted + other.float()
    for total in on_threads(make_groups(size), lambda group: ops.all_reduce(parts[group.rank], group)):
        assert isinstance(total, torch.Tensor), total
        assert total.dtype == dtype
        assert total.equal(wanted.to(dtype))


@pytest.mark.parametrize(("rows", "columns"), [(1, (1, 2)), (5, (7, 10, 13)), (3, (1, 3, 4, 2)), (9, (70_000, 60_001))])
@DTYPES
def test_a_gather_joins_columns_of_different_numbers(
    make_groups: MakeGroups, ops: Ops, rows: int, columns: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [part(rank, rows, width, dtype=dtype) for rank, width in enumerate(columns)]
    gathered = on_threads(
        make_groups(len(columns)), lambda group: ops.all_gather(parts[group.rank], sum(columns), group)
    )
    for whole in gathered:
        assert isinstance(whole, torch.Tensor), whole
        assert whole.equal(torch.cat(parts, dim=1))


def test_many_calls_of_different_sizes_do_not_mix(make_groups: MakeGroups, ops: Ops) -> None:
    def body(group: Communicator) -> list[object]:
        results: list[object] = []
        for call in range(200):
            x = part(100 * call + group.rank, 1 + call % 7, 8 + call % 50)
            results += [ops.all_reduce(x, group), ops.all_gather(x, 3 * (8 + call % 50), group)]
        return results

    groups = make_groups(3)
    results = on_threads(groups, body)
    for call in range(200):
        parts = [part(100 * call + rank, 1 + call % 7, 8 + call % 50) for rank in range(3)]
        for result in results:
            assert isinstance(result, list), result
            assert cast(torch.Tensor, result[2 * call]).equal(parts[0] + parts[1] + parts[2])
            assert cast(torch.Tensor, result[2 * call + 1]).equal(torch.cat(parts, dim=1))


def test_a_nan_and_an_infinity_stay_in_their_element(make_groups: MakeGroups, ops: Ops) -> None:
    def body(group: Communicator) -> object:
        x = torch.ones(2, 40, dtype=torch.bfloat16)
        if group.rank == 1:
            x[0, 3], x[1, 39] = torch.nan, torch.inf
        return ops.all_reduce(x, group)

    for total in on_threads(make_groups(2), body):
        assert isinstance(total, torch.Tensor), total
        assert total.isnan().nonzero().tolist() == [[0, 3]]
        assert total.isinf().nonzero().tolist() == [[1, 39]]


@pytest.mark.parametrize("width", [8, 200_001])
def test_a_stage_receives_what_the_same_rank_of_the_stage_before_sent(
    make_groups: MakeGroups, ops: Ops, width: int
) -> None:
    groups = make_groups(2, num_stages=3)
    token_ids, like = torch.zeros(4, dtype=torch.int32), torch.zeros(width)
    numbers = {id(group): number for number, group in enumerate(groups)}

    def body(group: Communicator) -> torch.Tensor | None:
        stage = numbers[id(group)] // 2
        received = torch.empty(3, 4, width)
        for step in range(3):
            if stage:
                received[step] = cast(torch.Tensor, ops.receive_rows(token_ids, like, group))
            if stage < 2:
                ops.send_rows(received[step] + 1 if stage else part(10 * group.rank + step, 4, width), group)
        return received

    for number, received in enumerate(on_threads(groups, body)[2:]):
        rank, hops = number % 2, number // 2
        assert isinstance(received, torch.Tensor), received
        assert received.equal(torch.stack([part(10 * rank + step, 4, width) for step in range(3)]) + hops)


def test_a_message_larger_than_an_inbox_arrives(native: NativeOps) -> None:
    def body(group: Communicator) -> torch.Tensor:
        x = torch.arange(INBOX_BYTES // 4 + 100_000, dtype=torch.int32)
        if group is groups[0]:
            group.send(x)
            return x
        received = torch.empty_like(x)
        group.receive(received)
        return received

    groups = shared_groups(native.library, 1, num_stages=2)
    sent, received = on_threads(groups, body)
    assert isinstance(sent, torch.Tensor)
    assert isinstance(received, torch.Tensor), received
    assert sent.equal(received)


@pytest.mark.parametrize("by_socket", [False, True])
def test_a_rank_that_fails_ends_those_that_wait_for_others(native: NativeOps, by_socket: bool) -> None:
    """The second of two stages: its rank 0 waits for the stage before, its rank 1 for rank 0, and gives up first."""
    ends = socket.socketpair()
    descriptor = create_segment(native.library, 4)
    previous = ends[1].fileno() if by_socket else 0
    second = SharedGroup(native.library, descriptor, RankPlace(0, 2, 1, 2), previous=previous)
    third = SharedGroup(native.library, descriptor, RankPlace(1, 2, 1, 2), 0.2)
    os.close(descriptor)

    def body(group: Communicator) -> object:
        return group.receive(torch.empty(4)) if group is second else group.exchange(torch.ones(4))

    waited, gave_up = on_threads([second, third], body)
    assert isinstance(gave_up, WorkerDied)
    assert "waited 0.2 s for rank 2" in str(gave_up)
    assert isinstance(waited, WorkerDied)
    assert "another rank failed" in str(waited)


def test_a_thread_that_aborts_ends_the_others() -> None:
    groups = thread_groups(2, num_stages=2)
    groups[0].abort("out of memory")

    def body(group: Communicator) -> object:
        return group.exchange(torch.ones(2, 4)) if group is groups[1] else group.receive(torch.empty(4))

    for died in on_threads(groups[1:], body):
        assert isinstance(died, WorkerDied)
        assert "out of memory" in str(died)


def test_a_rank_that_does_not_come_ends_the_others_after_the_deadline(make_groups: MakeGroups, ops: Ops) -> None:
    groups = make_groups(2, deadline_s=0.2)
    for _ in range(2):  # and from then on
        (died,) = on_threads(groups[:1], lambda group: ops.all_reduce(torch.ones(2, 4), group))
        assert isinstance(died, WorkerDied)
        assert "rank 0 of 2: waited 0.2 s for" in str(died)


def test_a_stage_that_is_sent_something_else_fails(make_groups: MakeGroups) -> None:
    groups = make_groups(1, num_stages=2)

    def body(group: Communicator) -> None:
        if group is groups[0]:
            group.send(torch.ones(8))
        else:
            group.receive(torch.empty(9))

    _, died = on_threads(groups, body)
    assert isinstance(died, WorkerDied)


def test_ranks_that_compute_different_ops_fail(native: NativeOps) -> None:
    ops = cast(Ops, native)

    def body(group: Communicator) -> object:
        x = torch.ones(4, 6)
        return ops.all_gather(x, 12, group) if group.rank else ops.all_reduce(x, group)

    for died in on_threads(shared_groups(native.library, 2), body):
        assert isinstance(died, WorkerDied)
    died = on_threads(
        shared_groups(native.library, 2), lambda group: ops.all_reduce(torch.ones(4 + group.rank, 6), group)
    )
    assert all(isinstance(error, WorkerDied) for error in died)
    assert any("computes something else" in str(error) for error in died)


def test_columns_that_do_not_add_up_fail(native: NativeOps) -> None:
    ops = cast(Ops, native)
    for width in (11, 13):
        for died in on_threads(
            shared_groups(native.library, 2), lambda group, width=width: ops.all_gather(torch.ones(4, 6), width, group)
        ):
            assert isinstance(died, WorkerDied)


def batch_of(tokens: int) -> ForwardBatch:
    """A batch for a forward without attention."""
    ids, index = torch.arange(tokens, dtype=torch.int32) % 50, torch.arange(tokens)
    return ForwardBatch(ids, ids, (), OutputRows(index, ()), index)


class Divided:
    """An embedding, a linear layer divided along its inputs, one divided along its outputs: the calls of a rank."""

    def __init__(self, ops: NativeOps, rank: int, size: int) -> None:
        def share(seed: int, dim: int) -> torch.Tensor:
            return part(seed, 64, 64).bfloat16().chunk(size, dim)[rank].contiguous()

        self.table = part(1, 50, 64).bfloat16().chunk(size, 1)[rank].contiguous()
        self.inner, self.head = ops.prepare_linear(share(2, 1)), ops.prepare_linear(share(3, 0))

    def forward(self, ops: Ops, batch: ForwardBatch, group: Communicator) -> object:
        x = ops.all_reduce(ops.linear(ops.embedding(batch.token_ids, self.table), self.inner), group)
        return ops.all_gather(ops.logits(x, self.head), 64, group)


def test_a_recorded_forward_gives_every_rank_the_bits_of_op_by_op(native: NativeOps) -> None:
    op_by_op, recorded = shared_groups(native.library, 2), shared_groups(native.library, 2)
    batches = [batch_of(tokens) for tokens in (1, 7, 3)]

    def run(group: Communicator) -> list[torch.Tensor]:
        model = Divided(native, group.rank, 2)
        return [cast(torch.Tensor, model.forward(cast(Ops, native), batch, group)) for batch in batches]

    def replay(group: Communicator) -> list[torch.Tensor]:
        model = Divided(native, group.rank, 2)
        program = record_forward(
            native.library,
            1,
            lambda ops, batch, _: model.forward(cast(Ops, ops), cast(ForwardBatch, batch), group),  # type: ignore[arg-type, return-value]
            batches[0],
            [],
        )
        return [program.run(batch)[0] for batch in batches]

    wanted = on_threads(op_by_op, run)
    for results in (*wanted, *on_threads(recorded, replay)):
        assert isinstance(results, list), results
        for one, other in zip(results, cast(list[torch.Tensor], wanted[0]), strict=True):
            assert one.equal(other)


def test_recorded_stages_give_the_bits_of_one(native: NativeOps) -> None:
    table, like = part(1, 50, 64).bfloat16(), torch.zeros(64, dtype=torch.bfloat16)
    weights = [native.prepare_linear(part(seed, 64, 64).bfloat16()) for seed in (2, 3)]
    groups = shared_groups(native.library, 1, num_stages=2)
    batches = [batch_of(tokens) for tokens in (1, 7, 3)]

    def first(ops: Ops, batch: ForwardBatch, _: object) -> object:
        residual = ops.embedding(batch.token_ids, table)
        for x in (ops.linear(residual, weights[0]), residual):
            ops.send_rows(x, groups[0])
        return residual

    def second(ops: Ops, batch: ForwardBatch, _: object) -> object:
        x, residual = (ops.receive_rows(batch.token_ids, like, groups[1]) for _ in range(2))
        return ops.linear(ops.add(x, residual), weights[1])

    def run(group: Communicator) -> list[torch.Tensor]:
        stage = first if group is groups[0] else second
        program = record_forward(native.library, 1, stage, batches[0], [])  # type: ignore[arg-type]
        return [program.run(batch)[0] for batch in batches]

    _, results = on_threads(groups, run)
    assert isinstance(results, list), results
    ops = cast(Ops, native)
    for batch, result in zip(batches, results, strict=True):
        x = ops.embedding(batch.token_ids, table)
        assert result.equal(cast(torch.Tensor, ops.linear(ops.add(ops.linear(x, weights[0]), x), weights[1])))


def test_a_recorded_forward_raises_when_a_rank_is_gone(native: NativeOps) -> None:
    alone = shared_groups(native.library, 2, deadline_s=0.1)[0]
    model = Divided(native, 0, 2)
    program = record_forward(
        native.library,
        1,
        lambda ops, batch, _: model.forward(cast(Ops, ops), cast(ForwardBatch, batch), alone),  # type: ignore[arg-type, return-value]
        batch_of(1),
        [],
    )
    with pytest.raises(WorkerDied, match=r"rank 0 of 2: waited 0.1 s for rank 1"):
        program.run(batch_of(3))


RANK = """
import sys, torch
from pagoda.base.errors import WorkerDied
from pagoda.base.ranks import RankPlace
from pagoda.kernels.collectives.shared_memory import SharedGroup
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
descriptor, rank, size = map(int, sys.argv[1:])
ops = NativeOps(load(), 1)
group = SharedGroup(ops.library, descriptor, RankPlace(rank, size))
try:
    step = 0
    while True:
        total = ops.all_reduce(torch.full((16, 576), float(rank + step)), group)
        assert total.eq(sum(range(size)) + size * step).all(), (step, total)
        if step == 500:
            print("computes", flush=True)
        step = min(step + 1, 501)
except WorkerDied as error:
    print(error)
"""


def test_processes_compute_together_until_one_is_killed(native: NativeOps) -> None:
    descriptor = create_segment(native.library, 3)
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(descriptor), str(rank), "3"],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[descriptor],
            )
            for rank in range(3)
        ]
    finally:
        os.close(descriptor)
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "computes\n"
        ranks[1].kill()
        ranks[1].wait()
        said = [rank.communicate(timeout=60)[0] for rank in (ranks[0], ranks[2])]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "the process of rank 1 is gone" in said[0] + said[1]
    assert all(text.startswith("rank ") for text in said)


def socket_groups(library: NativeLibrary, deadline_s: float = 20.0) -> tuple[list[SharedGroup], list[socket.socket]]:
    """Two stages of one rank, each as on a machine of its own."""
    ends = list(socket.socketpair())
    groups = []
    for stage, sockets in enumerate(({"next": ends[0].fileno()}, {"previous": ends[1].fileno()})):
        descriptor = create_segment(library, 2)
        groups.append(SharedGroup(library, descriptor, RankPlace(0, 1, stage, 2), deadline_s, **sockets))
        os.close(descriptor)
    return groups, ends


def test_stages_of_two_machines_talk_through_a_socket(native: NativeOps) -> None:
    """More than a socket holds, in the order of sending."""
    (first, second), _ = socket_groups(native.library)
    sent = [torch.randn(rows, 4096) for rows in (300, 1, 77)]

    def body(group: Communicator) -> list[torch.Tensor]:
        received = [torch.empty_like(tensor) for tensor in sent]
        for out, tensor in zip(received, sent, strict=True):
            group.send(tensor) if group is first else group.receive(out)
        return received

    received = on_threads([first, second], body)[1]
    assert not isinstance(received, Exception), received
    assert all(torch.equal(*pair) for pair in zip(received, sent, strict=True))


@pytest.mark.parametrize("fault", ["closed", "silent", "other size"])
def test_a_stage_on_another_machine_that_fails_hangs_nobody(native: NativeOps, fault: str) -> None:
    (first, second), ends = socket_groups(native.library, 0.3 if fault == "silent" else 20.0)
    reasons = {"closed": "gone", "silent": "waited 0.3 s", "other size": "something else"}
    if fault == "closed":
        ends[0].close()
    elif fault == "other size":
        first.send(torch.zeros(3))
    with pytest.raises(WorkerDied, match=reasons[fault]):
        second.receive(torch.empty(4))
    if fault == "closed":
        ends[1].close()
        with pytest.raises(WorkerDied, match="gone"):
            first.send(torch.zeros(4))
