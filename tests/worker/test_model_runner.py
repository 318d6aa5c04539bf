"""Whole steps on a model whose tokens depend on every token its pages hold."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler_output import BlockDelta, RowFork
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.speculation.drafter import Draft
from pagoda.worker.speculation.lookup import NgramDrafter
from pagoda.worker.speculation.speculator import NEVER_DRAFTS, Speculator
from pagoda.worker.table_mirror import TableMirror
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.worker.hand_made import GREEDY, PagedSumModel, draft_setup, expected_next, i32, row_init, step

BLOCK = 4


def runner(on: DeviceUnderTest, broken_token: int = -1, speculator: Speculator | None = None) -> ModelRunner:
    model, ops, device = PagedSumModel(broken_token), on.ops(), on.made
    make_blocks = ops.make_device_blocks
    cache = CacheEngine(model.kv_groups, BLOCK, 30, 10, torch.float32, device, make_blocks)
    forward = ForwardRunner(cast("Any", model), ops, on.device)
    return ModelRunner(forward, TableMirror(8, 64, BLOCK, 1), cache, device, speculator)


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_next(tokens))
    return tokens[len(prompt) :]


def test_prefill_in_chunks_then_decode_next_to_another(on: DeviceUnderTest) -> None:
    run = runner(on)
    a, b = [3, 1, 4, 1, 5], [9, 2]
    first = run.run(step(1, [(0, 0, 3)], [], admitted=(row_init(0, a, [7, 3]),)))
    assert first.sampled.shape[0] == 0
    second = run.run(step(2, [(0, 3, 2), (5, 0, 2)], admitted=(row_init(5, b, [4]),)))
    assert second.num_sampled.tolist() == [1, 1]
    got_a, got_b = [int(second.sampled[0, 0])], [int(second.sampled[1, 0])]
    for k in range(3):
        delta = BlockDelta(i32(5), i32(0), i32(1), i32(9)) if k == 1 else BlockDelta()
        out = run.run(step(3 + k, [(5, 2 + k, 1), (0, 5 + k, 1)], block_delta=delta))
        got_b.append(int(out.sampled[0, 0]))
        got_a.append(int(out.sampled[1, 0]))
    assert got_a == continued(a, 4)
    assert got_b == continued(b, 4)
    assert out.duration_s > 0


def test_fork_copy_on_write_and_swap(on: DeviceUnderTest) -> None:
    run = runner(on)
    prompt = [3, 1, 4, 1, 5, 9]
    out = run.run(
        step(1, [(0, 0, 6)], [(0, 0), (1, 0)], admitted=(row_init(0, prompt, [7, 3]),), forks=(RowFork(0, 1, 1, 1),))
    )
    assert out.sampled[:, 0].tolist() == [expected_next(prompt)] * 2
    # Branch 1 writes into a copy of the shared tail.
    delta = BlockDelta(i32(1), i32(0), i32(1), i32(8))
    pair = np.array([[3, 8]], np.int32)
    out = run.run(step(2, [(0, 6, 1), (1, 6, 1)], block_delta=delta, copies=pair))
    assert out.sampled[:, 0].tolist() == [continued(prompt, 2)[1]] * 2
    # Branch 1 is parked in host memory, something else overwrites its blocks, then it returns elsewhere.
    tokens = prompt + continued(prompt, 2)
    out_pairs = np.array([[7, 2], [8, 1]], np.int32)
    run.run(step(3, [(2, 0, 8)], [], released=i32(0, 1), swap_out=out_pairs, admitted=(row_init(2, [1] * 8, [7, 8]),)))
    back = row_init(3, tokens, [12, 13], num_prompt=6, num_computed=7)
    out = run.run(step(4, [(3, 7, 1)], swap_in=np.array([[2, 12], [1, 13]], np.int32), admitted=(back,)))
    assert out.sampled[:, 0].tolist() == [expected_next(tokens)]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_drafts_are_accepted_up_to_the_first_that_differs(num_right: int, on: DeviceUnderTest) -> None:
    prompt = [3, 1, 4]
    truth = continued(prompt, 6)
    run = runner(on)
    run.run(step(1, [(0, 0, 3), (1, 0, 3)], admitted=(row_init(0, prompt, [1, 2, 3]), row_init(1, prompt, [4, 5, 6]))))
    drafts = np.array(truth[1:4], np.int32)
    drafts[num_right:] = (drafts[num_right:] + 1) % 97
    out = run.run(step(2, [(0, 3, 4), (1, 3, 1)], drafts={0: drafts}))
    accepted = num_right + 1
    assert out.num_sampled.tolist() == [accepted, 1]
    assert out.sampled[0].tolist() == truth[1 : 1 + accepted] + [-1] * (4 - accepted)
    assert out.sampled[1, 0] == truth[1]
    out = run.run(step(3, [(0, 3 + accepted, 1), (1, 4, 1)]))
    assert out.sampled[:, 0].tolist() == [truth[1 + accepted], truth[2]]


def test_drafts_do_not_change_seeded_tokens(on: DeviceUnderTest) -> None:
    params = SamplingParams(temperature=30.0)

    def tokens_of(drafts: np.ndarray | None) -> list[int]:
        run = runner(on)
        run.run(step(1, [(0, 0, 3)], admitted=(row_init(0, [3, 1, 4], [1, 2, 3], params, seed=5),)))
        at, got = 3, []
        if drafts is not None:
            out = run.run(step(2, [(0, 3, 1 + len(drafts))], drafts={0: drafts}))
            got = out.sampled[0, : out.num_sampled[0]].tolist()
            at += len(got)
        while len(got) < 5:
            out = run.run(step(9, [(0, at, 1)]))
            got.append(int(out.sampled[0, 0]))
            at += 1
        return got[:5]

    plain = tokens_of(None)
    assert len(set(plain)) > 1
    assert tokens_of(np.array(plain[:3], np.int32)) == plain
    assert tokens_of(np.array([plain[0], plain[1] ^ 1, plain[2]], np.int32)) == plain


def test_a_row_that_is_not_finite_is_reported_alone(on: DeviceUnderTest) -> None:
    run = runner(on, broken_token=66)
    late = SamplingParams(temperature=0, min_tokens=3)
    out = run.run(
        step(1, [(0, 0, 2), (1, 0, 2)], admitted=(row_init(0, [5, 66], [1], late, eos=(3,)), row_init(1, [5, 6], [2]))),
    )
    assert list(out.failed) == [0]
    assert not out.refused
    assert out.num_sampled.tolist() == [0, 1]
    assert out.sampled[:, 0].tolist() == [-1, expected_next([5, 6])]


def test_a_draft_that_is_rejected_cannot_fail_its_row(on: DeviceUnderTest) -> None:
    run = runner(on, broken_token=66)
    first = run.run(step(1, [(0, 0, 2)], admitted=(row_init(0, [5, 6], [1, 2]),)))
    truth = continued([5, 6], 3)
    assert first.sampled[0, 0] == truth[0]
    out = run.run(step(2, [(0, 2, 3)], drafts={0: np.array([66, 7], np.int32)}))
    assert not out.failed
    assert out.sampled[0, : out.num_sampled[0]].tolist() == [truth[1]]


def test_an_error_while_drafting_costs_no_token(on: DeviceUnderTest) -> None:
    class Broken(NgramDrafter):
        def propose(self, *_: object) -> list[Draft]:
            raise RuntimeError("injected")

    speculator = Speculator(draft_setup(4), Broken(1, 4), 64, 8)
    run = runner(on, speculator=speculator)
    for number, (start, count) in enumerate(((0, 2), (2, 1)), 1):
        admitted = (row_init(0, [5, 6], [1, 2]),) if number == 1 else ()
        out = run.run(step(number, [(0, start, count)], admitted=admitted))
        assert not out.failed
        assert not out.drafts
        assert out.sampled[0, 0] == continued([5, 6], 2)[number - 1]
    assert not speculator.is_on
    assert out.no_drafts_until == NEVER_DRAFTS


def test_prompt_logprobs_cover_the_chunk_and_name_the_next_token(on: DeviceUnderTest) -> None:
    run = runner(on)
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(temperature=0, prompt_logprobs=1, logprobs=0)
    first = run.run(step(1, [(0, 0, 3)], [], admitted=(row_init(0, prompt, [1, 2], params),)))
    assert first.prompt_logprobs[0].token_ids[:, 0].tolist() == [1, 4, 1]
    assert first.prompt_logprobs[0].token_ids[:, 1].tolist() == [expected_next(prompt[: i + 1]) for i in range(3)]
    second = run.run(step(2, [(0, 3, 2)]))
    assert second.prompt_logprobs[0].token_ids[:, 0].tolist() == [5]
    assert second.logprobs is not None
    assert second.logprobs.token_ids.tolist() == [[expected_next(prompt)]]
    assert second.logprobs.ranks.tolist() == [1]
    assert run.run(step(3, [(0, 5, 1)])).prompt_logprobs == {}


def test_pooling_gives_the_last_hidden_state_once(on: DeviceUnderTest) -> None:
    run = runner(on)
    init = row_init(0, [3, 1, 4], [1], None, pooling=PoolingParams(normalize=False))
    assert run.run(step(1, [(0, 0, 2)], [], admitted=(init,))).pooled == {}
    pooled = run.run(step(2, [(0, 2, 1)], [])).pooled
    assert pooled[0].tolist() == [sum((t + 1) * (p + 3) for p, t in enumerate([3, 1, 4]))]


def test_warming_up_leaves_no_trace(on: DeviceUnderTest) -> None:
    run = runner(on)
    run.warm_up()
    assert run.run(step(1, [(0, 0, 2)], admitted=(row_init(0, [3, 1], [1]),))).sampled[0, 0] == expected_next([3, 1])


def test_a_step_without_rows_still_applies_its_events(on: DeviceUnderTest) -> None:
    run = runner(on)
    out = run.run(step(1, [], admitted=(row_init(0, [3, 1], [1], GREEDY),)))
    assert out.sampled.shape[0] == 0
    assert run.run(step(2, [(0, 0, 2)])).sampled[0, 0] == expected_next([3, 1])


def test_events_that_cannot_be_applied_end_the_worker() -> None:
    with pytest.raises(WorkerDied, match="step 7"):
        runner(ON_CPU).run(step(7, [], copies=np.array([[1, 1000]], np.int32)))
