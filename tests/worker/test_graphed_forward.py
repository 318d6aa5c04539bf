"""Decode steps as graphs: the same tokens as op by op, in padded batches. Here a "graph" is the call, made again."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, KVLayer, Tail
from pagoda.kernels.ops import Ops
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.graphed_forward import GraphedForward, padded_context, padded_rows
from pagoda.worker.model_runner import ModelRunner
from tests.worker.hand_made import PagedSumModel, expected_next, i32, row_init, step

CPU = torch.device("cpu")
BLOCK = 4


class Recalls:
    """In place of CudaCapture: runs the call again, and writes its result where the first one was."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        out = run()

        def replay() -> None:
            self.replays += 1
            out.copy_(run())

        return out, replay


def make(capture) -> tuple[ModelRunner, GraphedForward, CacheEngine]:
    model: Any = PagedSumModel()
    ops: Any = TorchOps()
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CPU)
    forward = GraphedForward(model, ops, 8, 64, CPU, capture=capture)
    return ModelRunner(forward, DeviceTable(8, 64, BLOCK, 1), cache, CPU), forward, cache


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
    run, forward, cache = make(recalls)
    decode(run, range(9))
    assert forward.num_graphs == 2  # for 4 rows (3 of them real) and for 2
    assert recalls.replays == 7  # all decodes but the first of each size
    assert (
        cache.layers[0].k[25:] == 0
    ).all()  # the rows that fill up a batch write to no row's blocks, nor to free ones


def test_where_no_graph_can_be_captured_steps_run_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    def cannot(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    run, forward, _ = make(cannot)
    decode(run, range(9))
    assert forward.num_graphs == 0
    assert len([record for record in caplog.records if "no graph could be captured" in record.message]) == 1


def test_a_new_cache_is_captured_again() -> None:
    run, forward, _ = make(Recalls())
    decode(run, range(3))
    assert forward.num_graphs == 1
    cache = CacheEngine(PagedSumModel().kv_groups, BLOCK, 60, 0, torch.float32, CPU)
    again = ModelRunner(forward, DeviceTable(8, 64, BLOCK, 1), cache, CPU)
    decode(again, range(3))
    assert forward.num_graphs == 1


def test_steps_with_a_shared_prefix_have_graphs_of_their_own() -> None:
    """A graph reads the prefix of each step from the memory that it was captured with."""
    seen: list[list[int] | None] = []

    class Model(PagedSumModel):
        def forward(self, ops: Ops, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
            shared = batch.metadata[0].shared_prefix
            seen.append(None if shared is None else shared.tolist())
            return super().forward(ops, batch, kv)

    model, recalls = Model(), Recalls()
    forward = GraphedForward(model, TorchOps(), 8, 64, CPU, capture=recalls)  # type: ignore[arg-type]
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CPU)
    ones, index = torch.ones(2, dtype=torch.int32), torch.arange(2)
    start, table = torch.arange(3, dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
    for prefix in (None, (4, 2), None, (8, 2), (12, 1)):
        shared = None if prefix is None else torch.tensor(prefix, dtype=torch.int32)
        metadata = (AttentionMetadata(start, ones, table, index + BLOCK, BLOCK, 1, 1, shared),)
        forward.forward(ForwardBatch(ones, ones - 1, metadata, Tail(index, metadata), index), cache.layers)
    assert forward.num_graphs == 2
    # First op by op, then captured, then replayed.
    assert seen == [None, [4, 2], None, None, [8, 2], [8, 2], [12, 1]]


def test_sizes() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 64, 65, 250, 257)] == [1, 2, 4, 4, 8, 8, 16, 64, 80, 256, 288]
    assert all(padded_rows(n) >= n and padded_rows(padded_rows(n)) == padded_rows(n) for n in range(1, 600))
    assert [padded_context(n, 5000) for n in (1, 1024, 1025, 4096, 4097)] == [1024, 1024, 2048, 4096, 5000]
    assert padded_context(3, 64) == 64
