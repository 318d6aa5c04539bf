"""Decode steps as graphs: the same tokens as op by op, in padded batches. Here a "graph" is the call, made again."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagoda.base.errors import InvariantBroken
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler_output import RowFork, SchedulerOutput
from pagoda.kernels import transfer
from pagoda.kernels.batch import ForwardBatch, KVLayer, OutputRows
from pagoda.kernels.low_rank.table import LowRankPiece, PlainLowRank
from pagoda.kernels.ops import Ops
from pagoda.kernels.torch_ops import TorchOps
from pagoda.kernels.transfer import parts_to_device, to_device
from pagoda.worker import forward_runner, sampler
from pagoda.worker.batch_rows import BatchRows, PaddedSize, Padding, padded_context, padded_rows, padded_tokens
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.devices import Device
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.forward_runner import Computed, ForwardRunner, Graphs
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.staging import StagingBatch, StepInputs
from pagoda.worker.table_mirror import TableMirror
from tests.worker.hand_made import GREEDY, PagedSumModel, expected_next, i32, row_init, step
from tests.worker.lagging_device import LaggingDevice
from tests.worker.recalls import Recalls

CPU = torch.device("cpu")
BLOCK = 4


def graphed(model: Any, capture: Any, max_query_len: int = 1) -> tuple[ForwardRunner, Graphs]:
    ops: Any = TorchOps()
    graphs = Graphs(ops, Padding(8, 64, max_query_len), capture)
    return ForwardRunner(model, ops, recorder=graphs), graphs


def make(capture, device: Device | None = None) -> tuple[ModelRunner, ForwardRunner, Graphs, CacheEngine]:
    model: Any = PagedSumModel()
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice())
    forward, graphs = graphed(model, capture)
    return ModelRunner(forward, TableMirror(8, 64, BLOCK, 1), cache, device or CpuDevice()), forward, graphs, cache


def filled(table: TableMirror, output: SchedulerOutput) -> StepInputs:
    """The step's inputs, not padded."""
    return StagingBatch(CPU).fill(table, output)


def decode(run: ModelRunner, numbers: range) -> None:
    """Three rows decode; the second leaves after three steps; after another, a prompt comes between."""
    rows = {0: [3, 1, 4], 1: [9, 2], 2: [5]}
    blocks = {row: list(range(1 + 8 * row, 9 + 8 * row)) for row in rows}
    run.run(
        step(
            1,
            [(row, 0, len(tokens)) for row, tokens in rows.items()],
            admitted=tuple(row_init(row, tokens, blocks[row]) for row, tokens in rows.items()),
        )
    )
    for tokens in rows.values():
        tokens.append(expected_next(tokens))
    for number in numbers:
        if number == 3:
            del rows[1]
        events: dict[str, Any] = {"released": i32(1)} if number == 3 else {}
        out = run.run(step(2 + number, [(row, len(tokens) - 1, 1) for row, tokens in rows.items()], **events))
        for tokens, got in zip(rows.values(), out.sampled[:, 0].tolist(), strict=True):
            tokens.append(expected_next(tokens))
            assert got == tokens[-1]
        if number == 4:  # not a graph: a prompt of two tokens next to the others
            rows[1] = [7, 7]
            spans = [(row, len(tokens) - 1, 1) for row, tokens in rows.items() if row != 1] + [(1, 0, 2)]
            out = run.run(step(50, spans, admitted=(row_init(1, rows[1], blocks[1]),)))
            for row, got in zip([span[0] for span in spans], out.sampled[:, 0].tolist(), strict=True):
                rows[row].append(expected_next(rows[row]))
                assert got == rows[row][-1]


def test_padded_decodes_give_the_same_tokens() -> None:
    recalls = Recalls()
    run, _, graphs, cache = make(recalls)
    decode(run, range(9))
    assert graphs.num_graphs == 2  # for 4 rows (3 of them real) and for 2
    assert recalls.replays == 7  # all decodes but the first of each size
    assert (
        cache.layers[0].k[25:] == 0
    ).all()  # the rows that fill up a batch write to no row's blocks, nor to free ones


def test_where_no_graph_can_be_captured_steps_run_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    def cannot(run: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    run, _, graphs, _ = make(cannot)
    decode(run, range(9))
    assert graphs.num_graphs == 0
    assert len([record for record in caplog.records if "no graph could be captured" in record.message]) == 1


def test_a_failed_capture_is_tried_again_later_and_later_and_concerns_its_size_alone() -> None:
    recalls, tries = Recalls(), Counter[int]()

    def sometimes(run: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
        graph = recalls(run)
        num_rows = graph[0][0].shape[0]
        tries[num_rows] += 1
        if num_rows == 4 and tries[4] < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return graph

    run, forward, graphs, cache = make(sometimes)
    run._table.apply(step(1, [(0, 0, 1)], admitted=tuple(row_init(row, [3, 1, 4], [1 + row]) for row in range(4))))
    tried_at: list[int] = []
    for number in range(80):
        before = tries[4]
        for num_rows in (4, 2):
            inputs = forward.staging.fill(run._table, step(2, [(row, 2, 1) for row in range(num_rows)]))
            assert inputs.size is not None
            forward.run(inputs.batch, cache.layers, inputs.size)
        tried_at += [number] * (tries[4] - before)
        assert graphs.num_graphs == (number >= 1) + (number >= 75)
    assert tried_at == [1, 1 + 1 + 8, 10 + 1 + 64]
    assert tries[2] == 1


def test_what_a_failed_capture_computed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not fit next to the step that is then run op by op."""
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def cannot(run: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
        results = [result.clone() for result in run()]
        kept.extend(map(weakref.ref, results))
        raise torch.OutOfMemoryError("CUDA out of memory")

    plain = ForwardRunner.run_op_by_op

    def noted(*args: Any) -> Computed:
        alive.extend(ref() is not None for ref in kept)
        return plain(*args)

    monkeypatch.setattr(ForwardRunner, "run_op_by_op", noted)
    run, *_ = make(cannot)
    decode(run, range(3))
    assert alive
    assert not any(alive)


def test_of_too_many_graphs_the_least_recently_used_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_runner, "_MOST_GRAPHS", 2)
    recalls = Recalls()
    run, forward, _, cache = make(recalls)
    table = run._table
    table.apply(step(1, [(0, 0, 1)], admitted=tuple(row_init(row, [3 + row, 1, 4], [1 + row]) for row in range(8))))

    def replays_of(num_rows: int) -> int:
        before = recalls.replays
        decodes = step(2, [(row, 2, 1) for row in range(num_rows)])
        inputs = forward.staging.fill(table, decodes)
        expected = forward.run_op_by_op(filled(table, decodes).batch, cache.layers)
        got = forward.run(inputs.batch, cache.layers, inputs.size)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours[:num_rows], theirs)
        return recalls.replays - before

    assert [replays_of(n) for n in (1, 1, 2, 2, 1, 4, 1, 4, 4, 2, 4, 1)] == [0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1]


def test_a_new_cache_is_captured_again() -> None:
    run, forward, graphs, _ = make(Recalls())
    decode(run, range(3))
    assert graphs.num_graphs == 1
    cache = CacheEngine(PagedSumModel().kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice())
    again = ModelRunner(forward, TableMirror(8, 64, BLOCK, 1), cache, CpuDevice())
    decode(again, range(3))
    assert graphs.num_graphs == 1


def test_steps_with_a_shared_prefix_have_graphs_of_their_own() -> None:
    """A graph reads the prefix of each step from the memory that it was captured with."""
    seen: list[list[int] | None] = []

    class Model(PagedSumModel):
        def forward(self, ops: Ops, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
            shared = batch.metadata[0].shared_prefix
            seen.append(None if shared is None else shared.tolist())
            return super().forward(ops, batch, kv)

    model, recalls = Model(), Recalls()
    forward, graphs = graphed(model, recalls)
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice())
    ones, slots, memory = np.ones(2, np.int32), np.arange(2) + BLOCK, torch.empty(4096, dtype=torch.uint8)
    for prefix in (None, (4, 2), None, (8, 2), (12, 1)):
        shared = () if prefix is None else (i32(*prefix),)
        size = PaddedSize(2, 2, 1, 64)
        rows = BatchRows(np.arange(3, dtype=np.int32), ones, [ones[:, None]], 1, 1, shared, None, BLOCK).padded(size)
        parts = [[ones, ones - 1, np.arange(2)], [slots], rows.arrays]
        (token_ids, positions, index), of_groups, of_rows = parts_to_device(parts, CPU, memory)
        metadata = rows.metadata(of_groups, of_rows)
        batch = ForwardBatch(token_ids, positions, metadata, OutputRows(index, metadata), index)
        forward.run(batch, cache.layers, size)
    assert graphs.num_graphs == 2
    # First op by op, then captured, then replayed.
    assert seen == [None, [4, 2], None, None, [8, 2], [8, 2], [12, 1]]


class Writes(TorchDispatchMode):
    """Notes the calls that write to the memory of padded steps, and holds the copies to it back if `is_late`."""

    def __init__(self, forward: ForwardRunner, is_late: bool = False) -> None:
        super().__init__()
        self._forward, self._is_late = forward, is_late
        self.calls: list[str] = []
        self.late: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory, target = self._forward.staging._memory, args[0] if args else None
        writes = bool(func._schema.arguments) and func._schema.arguments[0].is_write
        if writes and memory is not None and isinstance(target, torch.Tensor) and _share(target, memory):
            self.calls.append(func._overloadpacket.__name__)
            if self._is_late:
                self.late.append(lambda: func(*args, **(kwargs or {})))
                return target
        return func(*args, **(kwargs or {}))


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_one_copy_brings_all_inputs_of_a_graph(is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is written, except for tokens that only the device has, if steps are launched ahead."""
    moved: list[int] = []

    def counted(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        moved.append(len(arrays))
        return to_device(arrays, device)

    for module in (transfer, sampler):
        monkeypatch.setattr(module, "to_device", counted)
    recalls, device = Recalls(), LaggingDevice()
    run, forward, *_ = make(recalls, device)
    admitted = (row_init(0, [3, 1, 4], [1, 2, 3]), row_init(1, [9, 2], [4, 5, 6]), row_init(2, [5], [7, 8]))
    prompts = [[3, 1, 4], [9, 2], [5]]
    steps = [run.launch(step(1, [(0, 0, 3), (1, 0, 2), (2, 0, 1)], admitted=admitted))]
    moved.clear()
    for number in range(5):
        if not is_ahead:
            steps[-1].result()
        with Writes(forward) as writes:
            steps.append(run.launch(step(2 + number, [(0, 3 + number, 1), (1, 2 + number, 1), (2, 1 + number, 1)])))
        if number:  # the memory is made in the first
            assert writes.calls == ["copy_", *(["index_copy_"] if is_ahead else [])]
    assert not moved
    assert recalls.replays == 4
    for step_number, launched in enumerate(steps):
        for tokens, got in zip(prompts, launched.result().sampled[:, 0].tolist(), strict=True):
            assert got == expected_next(tokens), step_number
            tokens.append(got)


@torch.inference_mode()
def test_inputs_of_two_steps_in_flight_do_not_mix() -> None:
    """The device is late: both steps have been prepared on the host before the first copy begins."""
    run, forward, *_ = make(Recalls())
    table = run._table
    admitted = (row_init(0, [3, 1, 4, 1], [1, 2, 3]), row_init(1, [9, 2, 6], [4, 5, 6]))
    run.run(step(1, [(0, 0, 3), (1, 0, 2)], admitted=admitted))
    spans = [[(0, 3, 1), (1, 2, 1)], [(1, 2, 1), (0, 3, 1)]]
    forward.staging.fill(table, step(2, spans[0]))  # makes the memory
    expected = [filled(table, step(2, of_step)).batch for of_step in spans]
    with Writes(forward, is_late=True) as writes:
        steps = [forward.staging.fill(table, step(2, of_step)) for of_step in spans]
    assert writes.calls == ["copy_"] * 2
    for copy, inputs, plain in zip(writes.late, steps, expected, strict=True):
        copy()
        batch = inputs.batch
        assert inputs.size == (2, 2, 1, 64)
        assert torch.equal(batch.token_ids[:2], plain.token_ids)
        assert torch.equal(batch.positions[:2], plain.positions)
        ours, theirs = batch.metadata[0], plain.metadata[0]
        assert torch.equal(ours.seq_lens[:2], theirs.seq_lens)
        assert torch.equal(ours.slot_mapping[:2], theirs.slot_mapping)
        assert torch.equal(ours.block_table[:2, : theirs.block_table.shape[1]], theirs.block_table)
    assert expected[0].token_ids.tolist() != expected[1].token_ids.tolist()


@pytest.mark.parametrize("num_rows", [1, 3, 5, 8])
@torch.inference_mode()
def test_batches_of_a_size_are_at_the_same_addresses(num_rows: int) -> None:
    """Whatever follows the batch in the copy: how tokens are drawn, and tokens in flight."""
    run, forward, *_ = make(Recalls())
    params = [GREEDY, SamplingParams(temperature=0.8, top_k=5)]
    for sampling in params:
        admitted = tuple(row_init(row, [3, 1, 4], [1 + row], sampling) for row in range(num_rows))
        run.run(step(1, [(row, 0, 2) for row in range(num_rows)], [], admitted=admitted))
        decodes = step(2, [(row, 2, 1) for row in range(num_rows)])
        inputs = forward.staging.fill(run._table, decodes)
        batch, first = inputs.batch, inputs.batch.metadata[0]
        found = [
            (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            for tensor in (
                batch.token_ids, batch.positions, batch.outputs.index, batch.logits_index, first.query_start,
                first.seq_lens, first.block_table, first.slot_mapping,
            )
        ]  # fmt: skip
        assert all(address % 16 == found[0][0] % 16 for address, *_ in found)
        assert batch.token_ids.shape[0] == padded_rows(num_rows)
        assert batch.logits_index[:num_rows].tolist() == list(range(num_rows))
        assert inputs.num_logits == num_rows
        if sampling is GREEDY:
            before = found
            assert inputs.draw_params is None
        else:
            assert inputs.draw_params is not None
            assert found == before


def test_only_steps_of_one_draw_per_row_are_padded() -> None:
    """So that all there is of a step fits in the memory of the graphs."""
    run, forward, *_ = make(Recalls())
    run.run(step(1, [(0, 0, 2)], [], admitted=(row_init(0, [3, 1, 4], [1]),)))
    many = step(2, [(0, 2, 1)], [(0, 0)] * 2000, forks=tuple(RowFork(0, row, row, row) for row in (1, 2)))
    inputs = forward.staging.fill(run._table, many)
    assert inputs.size is None
    assert inputs.batch.token_ids.shape[0] == 1
    with pytest.raises(InvariantBroken, match="bytes of memory"):
        parts_to_device([[np.zeros(100_000)]], CPU, torch.empty(4096, dtype=torch.uint8))


def test_steps_with_adapters_have_graphs_until_their_tables_move() -> None:
    class Model(PagedSumModel):
        def forward(self, ops: Any, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
            return ops.linear(super().forward(ops, batch, kv), weight)

    model, ops, recalls = Model(), TorchOps(), Recalls()
    weight = ops.prepare_linear(torch.ones(1, 1))
    tables = {id(weight): PlainLowRank(3, 1, 1, torch.float32)}
    graphs = Graphs(ops, Padding(8, 64), recalls, tables)  # type: ignore[arg-type]
    forward = ForwardRunner(model, ops, tables=tables, recorder=graphs)  # type: ignore[arg-type]
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice())
    table, slots = TableMirror(8, 64, BLOCK, 1), i32(0, 2, 1, 0, 0, 0, 0, 0)
    table.apply(step(1, [(0, 0, 1)], admitted=tuple(row_init(row, [3 + row, 1, 4], [1 + row]) for row in range(3))))
    for number in range(8):
        if number in (0, 4):
            for slot in (1, 2):
                tables[id(weight)].fill(slot, [LowRankPiece(torch.full((1, 1), slot + number), torch.ones(1, 1))])
        adapters = None if number == 6 else slots
        decodes = step(2, [(row, 2, 1) for row in range(3)])
        inputs = forward.staging.fill(table, decodes, adapters)
        assert inputs.size is not None
        plain = StagingBatch(CPU).fill(table, decodes, adapters)
        expected = forward.run_op_by_op(plain.batch, cache.layers)
        for ours, theirs in zip(forward.run(inputs.batch, cache.layers, inputs.size), expected, strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours[:3], theirs)
        assert graphs.num_graphs == (0 if number in (0, 4) else 1)
    assert recalls.replays == 3 + 2


@pytest.mark.parametrize(("longest", "num_layers"), [(4, 0), (4, 1), (12, 0)])
def test_steps_of_several_tokens_per_row(longest: int, num_layers: int) -> None:
    """Rows that verify drafts, and parts of prompts: each has its own number of tokens, and some have no logits."""
    rng, model, recalls = np.random.default_rng(0), PagedSumModel(), Recalls()
    cache, plain_cache = (CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice()) for _ in range(2))
    forward, graphs = graphed(model, recalls, max_query_len=4)
    table = TableMirror(8, 64, BLOCK, 1)
    known = [rng.integers(0, 90, 40).tolist() for _ in range(8)]
    blocks = [range(1 + 7 * row, 8 + 7 * row) for row in range(8)]
    admitted = tuple(row_init(row, tokens[:20], blocks[row]) for row, tokens in enumerate(known))
    table.apply(step(1, [(0, 0, 1)], admitted=admitted))
    for row, tokens in enumerate(known):
        table.token_ids[row, :40] = tokens
    num_without_logits = 0
    for number in range(60):
        rows = rng.permutation(8)[: rng.integers(1, 9)].tolist()
        spans = [(row, int(rng.integers(0, 28 - longest)), int(rng.integers(1, longest + 1))) for row in rows]
        drafts = {row: i32(*known[row][start + 1 : start + count]) for row, start, count in spans if 1 < count <= 4}
        samples = [(row, i) for i, row in enumerate(rows) if row in drafts or rng.random() < 0.9]
        planned = step(2, spans, samples, drafts=drafts if number % 3 else {})
        inputs = forward.staging.fill(table, planned, num_layers=num_layers)
        assert inputs.size is not None
        metadata = inputs.batch.metadata[0]
        assert metadata.query_start[-1] == inputs.batch.token_ids.shape[0]
        assert int(metadata.query_start.diff().max()) <= metadata.max_query_len
        got = forward.run(inputs.batch, cache.layers, inputs.size).logits
        expected = forward.run_op_by_op(filled(table, planned).batch, plain_cache.layers).logits
        if expected is None:  # none samples
            num_without_logits += 1
        else:
            assert got is not None
            assert torch.equal(got[: inputs.num_logits], expected)
        assert torch.equal(cache.layers[0].k[1:], plain_cache.layers[0].k[1:])
    assert longest == 4 or num_without_logits
    assert 1 < graphs.num_graphs < recalls.replays


def test_what_fills_a_step_up() -> None:
    """Rows as long as any may be, so that few are needed."""
    padding = Padding(100, 64, max_query_len=4)
    assert padding.size_of(3, 3, 1, 10) == PaddedSize(4, 4, 1, 64)
    assert padding.size_of(3, 4, 2, 10) == PaddedSize(4, 4, 2, 64)
    assert padding.size_of(3, 9, 4, 10) == PaddedSize(16, 8, 4, 64)
    assert padding.size_of(64, 130, 3, 10) == PaddedSize(160, 128, 4, 64)
    assert padding.size_of(100, 400, 4, 10) == PaddedSize(448, 128, 4, 64)
    # With parts of prompts, one row takes what fills the step up, so that rows vary less.
    assert padding.size_of(2, 6, 5, 10) == PaddedSize(8, 3, 8, 64)
    assert padding.size_of(2, 8, 7, 10) == PaddedSize(8, 3, 8, 64)
    assert padding.size_of(64, 500, 400, 10) == PaddedSize(512, 65, 64, 64)
    assert padding.size_of(64, 1024, 400, 10) == PaddedSize(1024, 65, 64, 64)
    assert padding.size_of(2, 1025, 400, 10) is None
    assert padding.size_of(100, 513, 4, 10) is None
    for longest in (4, 200):
        for num_rows in range(1, 101):
            for num_tokens in range(num_rows, min(longest * num_rows, 1024) + 1, 3 + longest):
                size = padding.size_of(num_rows, num_tokens, longest, 10)
                assert size is not None
                assert size.num_tokens - num_tokens <= size.max_query_len * (size.num_rows - num_rows)
                assert num_rows <= size.num_rows <= size.num_tokens


def test_sizes() -> None:
    rows = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 64: 64, 65: 80, 250: 256, 257: 288}
    assert {count: padded_rows(count) for count in rows} == rows
    assert all(padded_rows(n) >= n and padded_rows(padded_rows(n)) == padded_rows(n) for n in range(1, 600))
    assert all(n <= padded_tokens(n) == padded_rows(padded_tokens(n)) < 1.25 * n + 8 for n in range(1, 600))
    assert {padded_tokens(n) for n in range(65, 513)} == {80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512}
    assert [padded_context(n, 5000) for n in (1, 1024, 1025, 4096, 4097)] == [1024, 1024, 2048, 4096, 5000]
    assert padded_context(3, 64) == 64
