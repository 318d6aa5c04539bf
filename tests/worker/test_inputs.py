"""The batch built by columns against the same built by loops."""

import numpy as np
import pytest
import torch

from pagoda.base.sampling_params import PoolingParams, SamplingParams
from pagoda.core.scheduler_output import RowFork, SchedulerOutput
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.inputs import StepInputs, build_inputs, bulk_copy
from tests.worker.hand_made import i32, row_init, step

CPU = torch.device("cpu")
BLOCK = 4


def random_table(rng: np.random.Generator, num_groups: int) -> DeviceTable:
    table = DeviceTable(16, 64, BLOCK, num_groups)
    table.token_ids[:] = rng.integers(0, 1000, table.token_ids.shape)
    for blocks in table.block_tables:
        blocks[:] = rng.integers(1, 500, blocks.shape)
    return table


def check(table: DeviceTable, output: SchedulerOutput, inputs: StepInputs) -> None:
    """Everything a forward pass reads, token by token."""
    t = 0
    for i, (row, start, count) in enumerate(zip(output.rows, output.start, output.num_new, strict=True)):
        for metadata in inputs.batch.metadata:
            assert metadata.query_start[i] == t
            assert metadata.seq_lens[i] == start + count
        for position in range(start, start + count):
            assert inputs.batch.token_ids[t] == table.token_ids[row, position]
            assert inputs.batch.positions[t] == position
            for blocks, metadata in zip(table.block_tables, inputs.batch.metadata, strict=True):
                slot = blocks[row, position // BLOCK] * BLOCK + position % BLOCK
                assert metadata.slot_mapping[t] == slot
                assert metadata.block_table[i, position // BLOCK] == blocks[row, position // BLOCK]
            t += 1
    for metadata in inputs.batch.metadata:
        assert metadata.query_start[-1] == t == len(inputs.batch.token_ids)
        assert metadata.max_query_len == output.num_new.max()
        assert metadata.max_seq_len == (output.start + output.num_new).max()
        assert metadata.slot_mapping.dtype == torch.int64
        assert metadata.block_table.dtype == metadata.seq_lens.dtype == metadata.query_start.dtype == torch.int32


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("longest", [1, 2, 9])
def test_batches_of_any_mix(num_groups: int, longest: int) -> None:
    rng = np.random.default_rng([num_groups, longest])
    for _ in range(10):
        table = random_table(rng, num_groups)
        rows = rng.permutation(16)[: rng.integers(1, 16)]
        spans = [(int(row), int(rng.integers(0, 50)), int(rng.integers(1, longest + 1))) for row in rows]
        samples = [(span[0], i) for i, span in enumerate(spans) if rng.random() < 0.7]
        output = step(1, spans, samples)
        inputs = build_inputs(table, output, CPU)
        check(table, output, inputs)
        ends = np.cumsum([count for _, _, count in spans])
        assert inputs.batch.logits_index.tolist() == [ends[i] - 1 for _, i in samples]
        assert inputs.draw_rows.tolist() == [row for row, _ in samples]
        assert inputs.draw_positions.tolist() == [spans[i][1] + spans[i][2] for _, i in samples]
        assert inputs.takes_all_logits == (inputs.batch.logits_index.tolist() == list(range(ends[-1])))


def test_tensors_are_int32_and_contiguous_whatever_the_scheduler_sent() -> None:
    table = random_table(np.random.default_rng(0), 1)
    spans = np.array([[1, 7, 1], [2, 4, 1]], np.int64)
    output = SchedulerOutput(1, spans[:, 0], spans[:, 1], spans[:, 2], i32(1, 2), i32(0, 1), 2)
    batch = build_inputs(table, output, CPU).batch
    metadata = batch.metadata[0]
    for tensor in (batch.token_ids, batch.positions, metadata.query_start, metadata.seq_lens, metadata.block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_one_copy_carries_all_arrays() -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(-9, 9, shape).astype(dtype)
        for shape in [(0,), (1,), (3, 5), (17,), (2, 0)]
        for dtype in (np.int32, np.int64)
    ]
    arrays.append(np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2])
    for array, tensor in zip(arrays, bulk_copy(arrays, CPU), strict=True):
        assert tensor.shape == array.shape
        assert (tensor.numpy() == array).all()
        assert tensor.numpy().dtype == array.dtype


def test_forks_share_logits() -> None:
    table = random_table(np.random.default_rng(0), 1)
    forks = (RowFork(3, 4, 1, 1), RowFork(3, 5, 2, 2))
    output = step(1, [(9, 5, 1), (3, 0, 4)], [(9, 0), (3, 1), (4, 1), (5, 1)], forks=forks)
    inputs = build_inputs(table, output, CPU)
    assert inputs.batch.logits_index.tolist() == [0, 4]
    assert inputs.draw_logits is not None
    assert inputs.draw_logits.tolist() == [0, 1, 1, 1]
    assert inputs.draw_rows.tolist() == [9, 3, 4, 5]
    assert inputs.draw_positions.tolist() == [6, 4, 4, 4]
    assert inputs.num_logits == 2


def test_drafts_draw_at_each_of_their_positions() -> None:
    table = random_table(np.random.default_rng(0), 1)
    output = step(1, [(1, 7, 3), (2, 4, 1), (3, 0, 2)], [(1, 0), (2, 1)], drafts={1: i32(8, 9)})
    inputs = build_inputs(table, output, CPU)
    assert inputs.num_draws.tolist() == [3, 1]
    assert inputs.draw_rows.tolist() == [1, 1, 1, 2]
    assert inputs.draw_positions.tolist() == [8, 9, 10, 5]
    assert inputs.draw_logits is not None
    assert inputs.batch.logits_index[torch.from_numpy(inputs.draw_logits)].tolist() == [0, 1, 2, 3]


def test_prompt_logprobs_and_pooling_ask_for_more_positions() -> None:
    table = DeviceTable(4, 64, BLOCK, 1)
    wants = SamplingParams(prompt_logprobs=3)
    admitted = (
        row_init(0, range(6), [1, 2], wants),
        row_init(1, range(3), [3], None, pooling=PoolingParams()),
        row_init(2, range(5), [4, 5], None, pooling=PoolingParams()),
    )
    output = step(1, [(0, 2, 4), (1, 0, 3), (2, 0, 4)], [(0, 0)], admitted=admitted)
    table.apply(output)
    inputs = build_inputs(table, output, CPU)
    assert inputs.num_logits == 1
    assert inputs.prompt_rows == ((0, 2, 3),)  # position 5 is the last: it has no next prompt token
    assert inputs.pooled_rows == (1,)  # row 2 is not through its prompt
    assert inputs.batch.logits_index.tolist() == [3, 0, 1, 2, 6]
