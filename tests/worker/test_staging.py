"""The batch built by columns against the same built by loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler_output import RowFork, SchedulerOutput
from pagoda.kernels.native.arguments import new_group
from pagoda.kernels.transfer import bulk_copy
from pagoda.models.base import TOKEN_TYPES
from pagoda.worker.staging import PooledChunk, StagingBatch, StepInputs
from pagoda.worker.table_mirror import TableMirror
from tests.device_under_test import DeviceUnderTest, moved
from tests.worker.hand_made import i32, row_init, step

CPU = torch.device("cpu")
BLOCK = 4


def random_table(rng: np.random.Generator, num_groups: int) -> TableMirror:
    table = TableMirror(16, 64, BLOCK, num_groups)
    table.token_ids[:] = rng.integers(0, 1000, table.token_ids.shape)
    for blocks in table.block_tables:
        blocks[:] = rng.integers(1, 500, blocks.shape)
    return table


def built(table: TableMirror, output: SchedulerOutput, on: DeviceUnderTest, num_token_types: int = 0) -> StepInputs:
    """Return the inputs that are built on a device, brought back from it."""
    inputs = StagingBatch(on.device, num_token_types).fill(table, output)
    return replace(
        inputs,
        batch=moved(inputs.batch, CPU),
        draw_logits=moved(inputs.draw_logits, CPU),
        states_index=moved(inputs.states_index, CPU),
    )


def check(table: TableMirror, output: SchedulerOutput, inputs: StepInputs) -> None:
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
    check_outputs(table, output, inputs)
    for metadata in inputs.batch.metadata:
        assert metadata.query_start[-1] == t == len(inputs.batch.token_ids)
        assert metadata.max_query_len == output.num_new.max()
        assert metadata.max_seq_len == (output.start + output.num_new).max()
        assert metadata.slot_mapping.dtype == torch.int64
        assert metadata.block_table.dtype == metadata.seq_lens.dtype == metadata.query_start.dtype == torch.int32


def check_outputs(table: TableMirror, output: SchedulerOutput, inputs: StepInputs) -> None:
    """The output rows are whole ends of rows, no longer than what is wanted of them."""
    outputs = inputs.batch.outputs
    wanted = {*asked(inputs), *states(inputs)}
    ends = np.cumsum(output.num_new)
    index: list[int] = []
    rows: list[int] = []
    for i, (end, count) in enumerate(zip(ends.tolist(), output.num_new.tolist(), strict=True)):
        places = [place for place in range(end - count, end) if place in wanted]
        if places or (not wanted and end == ends[-1]):
            index += range(min(places, default=end - 1), end)
            rows.append(i)
    assert outputs.index.tolist() == index
    assert outputs.index.dtype == torch.int64
    assert index
    for metadata, blocks in zip(outputs.metadata, table.block_tables, strict=True):
        lengths = np.diff(metadata.query_start.numpy())
        assert metadata.query_start[0] == 0
        assert (outputs.index.numpy()[metadata.query_start[1:] - 1] == ends[rows] - 1).all()
        assert (lengths > 0).all()
        assert metadata.max_query_len == lengths.max()
        assert metadata.seq_lens.tolist() == (output.start + output.num_new)[rows].tolist()
        assert metadata.block_table.tolist() == blocks[output.rows[rows], : metadata.block_table.shape[1]].tolist()
        assert metadata.block_table.dtype == metadata.seq_lens.dtype == metadata.query_start.dtype == torch.int32


def asked(inputs: StepInputs) -> list[int]:
    """Which of the batch's tokens give logits."""
    return inputs.batch.outputs.index[inputs.batch.logits_index].tolist()


def states(inputs: StepInputs) -> list[int]:
    """The hidden states of which of the batch's tokens are needed otherwise."""
    if not inputs.prompt_rows and not inputs.pooled:
        return []
    index = inputs.batch.outputs.index
    return (index if inputs.states_index is None else index[inputs.states_index]).tolist()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("longest", [1, 2, 9])
def test_batches_of_any_mix(num_groups: int, longest: int, on: DeviceUnderTest) -> None:
    rng = np.random.default_rng([num_groups, longest])
    for _ in range(10):
        table = random_table(rng, num_groups)
        rows = rng.permutation(16)[: rng.integers(1, 16)]
        spans = [(int(row), int(rng.integers(0, 50)), int(rng.integers(1, longest + 1))) for row in rows]
        samples = [(span[0], i) for i, span in enumerate(spans) if rng.random() < 0.7]
        output = step(1, spans, samples)
        inputs = built(table, output, on)
        check(table, output, inputs)
        ends = np.cumsum([count for _, _, count in spans])
        assert asked(inputs) == [ends[i] - 1 for _, i in samples]
        assert inputs.draw_rows.tolist() == [row for row, _ in samples]
        assert inputs.draw_positions.tolist() == [spans[i][1] + spans[i][2] for _, i in samples]
        assert inputs.size is None


def test_a_model_without_kv_has_rows_all_the_same(on: DeviceUnderTest) -> None:
    """One metadata that says where rows begin, in a form that the native kernels take."""
    table = random_table(np.random.default_rng(0), 0)
    for num_rows in (1, 3):
        batch = built(table, step(1, [(row, 0, 2 + row) for row in range(num_rows)]), on).batch
        (metadata,) = batch.metadata
        assert metadata.query_start.tolist() == [0, 2, 5, 9][: num_rows + 1]
        assert metadata.seq_lens.tolist() == [2, 3, 4][:num_rows]
        assert not metadata.block_table.any()
        assert new_group(metadata).num_rows == num_rows
        assert TOKEN_TYPES not in batch.inputs


@pytest.mark.parametrize("num_token_types", [1, 2, 3])
def test_token_types_of_pairs(num_token_types: int, on: DeviceUnderTest) -> None:
    """Type 1 from the second text on, in models that have it; rows are used again without what they had."""
    table = TableMirror(4, 16, BLOCK, 1)
    pair, single = PoolingParams(pair_start=3), PoolingParams()
    admitted = row_init(2, [5] * 5, [1, 2], None, pooling=pair), row_init(0, [5] * 4, [3], None, pooling=single)
    output = step(1, [(2, 0, 5), (0, 0, 4)], [], admitted=admitted)
    table.apply(output)
    types = built(table, output, on, num_token_types).batch.inputs[TOKEN_TYPES].tensor
    assert types.dtype == torch.int32
    second = int(num_token_types > 1)
    assert types.tolist() == [0, 0, 0, second, second, 0, 0, 0, 0]
    again = step(2, [(2, 0, 5)], [], admitted=(row_init(2, [5] * 5, [1, 2], None, pooling=single),))
    table.apply(again)
    types = built(table, again, on, num_token_types).batch.inputs[TOKEN_TYPES].tensor
    assert types.tolist() == [0] * 5


def test_tensors_are_int32_and_contiguous_whatever_the_scheduler_sent(on: DeviceUnderTest) -> None:
    table = random_table(np.random.default_rng(0), 1)
    spans = np.array([[1, 7, 1], [2, 4, 1]], np.int64)
    output = SchedulerOutput(1, spans[:, 0], spans[:, 1], spans[:, 2], i32(1, 2), i32(0, 1), 2)
    batch = built(table, output, on).batch
    metadata = batch.metadata[0]
    for tensor in (batch.token_ids, batch.positions, metadata.query_start, metadata.seq_lens, metadata.block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_one_copy_carries_all_arrays(on: DeviceUnderTest) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(-9, 9, shape).astype(dtype)
        for shape in [(0,), (1,), (3, 5), (17,), (2, 0)]
        for dtype in (np.int32, np.int64)
    ]
    arrays.append(np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2])
    for array, tensor in zip(arrays, bulk_copy(arrays, on.device), strict=True):
        back = tensor.cpu().numpy()
        assert back.shape == array.shape
        assert (back == array).all()
        assert back.dtype == array.dtype


def test_forks_share_logits(on: DeviceUnderTest) -> None:
    table = random_table(np.random.default_rng(0), 1)
    forks = (RowFork(3, 4, 1, 1), RowFork(3, 5, 2, 2))
    output = step(1, [(9, 5, 1), (3, 0, 4)], [(9, 0), (3, 1), (4, 1), (5, 1)], forks=forks)
    inputs = built(table, output, on)
    assert asked(inputs) == [0, 4]
    check_outputs(table, output, inputs)
    assert inputs.draw_logits is not None
    assert inputs.draw_logits.tolist() == [0, 1, 1, 1]
    assert inputs.draw_rows.tolist() == [9, 3, 4, 5]
    assert inputs.draw_positions.tolist() == [6, 4, 4, 4]
    assert inputs.num_logits == 2


def test_drafts_draw_at_each_of_their_positions(on: DeviceUnderTest) -> None:
    table = random_table(np.random.default_rng(0), 1)
    output = step(1, [(1, 7, 3), (2, 4, 1), (3, 0, 2)], [(1, 0), (2, 1)], drafts={1: i32(8, 9)})
    inputs = built(table, output, on)
    assert inputs.num_draws.tolist() == [3, 1]
    assert inputs.draw_rows.tolist() == [1, 1, 1, 2]
    assert inputs.draw_positions.tolist() == [8, 9, 10, 5]
    assert inputs.draw_logits is None  # each has its own
    assert asked(inputs) == [0, 1, 2, 3]
    check_outputs(table, output, inputs)


def test_prompt_logprobs_and_pooling_ask_for_more_positions(on: DeviceUnderTest) -> None:
    table = TableMirror(4, 64, BLOCK, 1)
    wants = SamplingParams(prompt_logprobs=3)
    admitted = (
        row_init(0, range(6), [1, 2], wants),
        row_init(1, range(3), [3], None, pooling=PoolingParams()),
        row_init(2, range(5), [4, 5], None, pooling=PoolingParams()),
    )
    output = step(1, [(0, 2, 4), (1, 0, 3), (2, 0, 4)], [(0, 0)], admitted=admitted)
    table.apply(output)
    inputs = built(table, output, on)
    assert inputs.num_logits == 1
    assert inputs.prompt_rows == ((0, 2, 3),)  # position 5 is the last: it has no next prompt token
    assert inputs.pooled == (PooledChunk(1, 2, 1, True, True),)  # row 2 is not through its prompt
    assert asked(inputs) == [3]
    assert states(inputs) == [0, 1, 2, 6]
    assert inputs.batch.outputs.index.tolist() == [0, 1, 2, 3, 6]
    check_outputs(table, output, inputs)
