import numpy as np

from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.scheduler_output import BeamRows, BlockDelta, RowFork
from pagoda.worker.table_mirror import TableMirror
from tests.worker.hand_made import i32, row_init, step


def test_admission_writes_every_column() -> None:
    table = TableMirror(4, 32, 4, 1)
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=1.0, logprobs=2, prompt_logprobs=0
    )
    table.apply(step(1, [(2, 0, 5)], admitted=(row_init(2, [5, 6, 7, 8, 9], [3, 4], params, seed=-1),)))
    assert table.token_ids[2, :5].tolist() == [5, 6, 7, 8, 9]
    assert table.block_tables[0][2, :2].tolist() == [3, 4]
    assert (table.num_tokens[2], table.num_prompt[2]) == (5, 5)
    assert table.temperature[2] == np.float32(0.5)
    assert table.top_k[2] == 7
    assert (table.num_logprobs[2], table.num_prompt_logprobs[2]) == (2, 0)
    assert table.seeds[2] == 2**64 - 1
    assert table.constrained[2]


def test_a_row_reused_in_the_step_that_releases_it_keeps_nothing() -> None:
    table = TableMirror(2, 32, 4, 1)
    first = SamplingParams(logit_bias=((3, 1.0),), logprobs=5, prompt_logprobs=5)
    table.apply(step(1, [(1, 0, 2)], admitted=(row_init(1, [1, 2], [1], first),)))
    table.apply(step(2, [(1, 0, 3)], released=i32(1), admitted=(row_init(1, [7, 8, 9], [2]),)))
    assert not table.constrained[1]
    assert table.constraints[1] is None
    assert (table.num_logprobs[1], table.num_prompt_logprobs[1]) == (-1, -1)
    assert table.token_ids[1, :3].tolist() == [7, 8, 9]


def test_block_delta_goes_to_its_group() -> None:
    table = TableMirror(3, 32, 4, 2)
    delta = BlockDelta(i32(0, 1, 0), i32(0, 1, 1), i32(1, 0, 2), i32(11, 12, 13))
    table.apply(step(1, [], block_delta=delta))
    assert table.block_tables[0][0].tolist()[:3] == [0, 11, 0]
    assert table.block_tables[1][0].tolist()[:3] == [0, 0, 13]
    assert table.block_tables[1][1].tolist()[:3] == [12, 0, 0]


def test_fork_copies_all_but_the_seed() -> None:
    table = TableMirror(3, 32, 4, 1)
    params = SamplingParams(temperature=0.7, bad_words_token_ids=((4, 5),), prompt_logprobs=1, logprobs=1)
    admitted = (row_init(0, [1, 2, 3], [5], params, seed=10),)
    table.apply(step(1, [(0, 0, 3)], admitted=admitted, forks=(RowFork(0, 2, 1, 11),)))
    assert table.token_ids[2, :3].tolist() == [1, 2, 3]
    assert table.block_tables[0][2, 0] == 5
    assert table.temperature[2] == table.temperature[0]
    assert table.constraints[2] is table.constraints[0]
    assert table.seeds[[0, 2]].tolist() == [10, 11]
    assert table.num_logprobs[2] == 1
    assert table.num_prompt_logprobs[2] == -1  # the prompt is computed, and told, once


def test_beams_copy_rows_and_overwrite_what_was_sampled() -> None:
    table = TableMirror(3, 32, 4, 1)
    params = SamplingParams(n=2, beam_search=BeamSearchOptions())
    admitted = (row_init(0, [1, 2, 3], [5], params), row_init(1, [1, 2, 9], [6], params))
    table.apply(step(1, [(0, 0, 3), (1, 0, 3)], admitted=admitted))
    assert table.num_logprobs[:2].tolist() == [2, 2]
    table.record_tokens(i32(0, 1), i32(3, 3), i32(40, 40))
    beams = BeamRows(i32(0, 1), i32(0, 0), i32(3, 3), i32(41, 42))
    # Both write to block 5 next; the second one gets a copy of it.
    delta = BlockDelta(i32(1), i32(0), i32(0), i32(7))
    table.apply(step(2, [(0, 3, 1), (1, 3, 1)], beams=beams, block_delta=delta))
    assert table.token_ids[:2, :4].tolist() == [[1, 2, 3, 41], [1, 2, 3, 42]]
    assert table.num_tokens[:2].tolist() == [4, 4]
    assert table.block_tables[0][:2, 0].tolist() == [5, 7]


def test_drafts_are_stored_after_the_tokens_and_overwritten_by_commit() -> None:
    table = TableMirror(2, 32, 4, 1)
    table.apply(step(1, [(1, 0, 3)], admitted=(row_init(1, [1, 2, 3], [1]),)))
    table.record_tokens(i32(1), i32(3), i32(40))
    table.apply(step(2, [(1, 3, 3)], drafts={1: i32(50, 60)}))
    assert table.token_ids[1, :6].tolist() == [1, 2, 3, 40, 50, 60]
    assert table.num_tokens[1] == 4
    table.record_tokens(i32(1, 1), i32(4, 5), i32(50, 61))
    assert table.token_ids[1, :6].tolist() == [1, 2, 3, 40, 50, 61]
    assert table.num_tokens[1] == 6
