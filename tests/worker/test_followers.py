"""A rank that does not sample: it gets the tokens with the steps, and computes the same as the rank that samples."""

from typing import Any, cast

import torch

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig, PreemptionMode
from pagoda.base.ranks import RankPlace
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.speculation.lookup import NgramDrafter
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.table_mirror import TableMirror
from tests.device_under_test import ON_CPU
from tests.engine.driver import request
from tests.worker.hand_made import GREEDY, PagedSumModel, draft_setup, row_init, step

BLOCK, NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_ROWS, MAX_LEN = 4, 24, 12, 8, 64


def runner(place: RankPlace, speculator: Speculator | None = None) -> ModelRunner:
    model, ops, device = PagedSumModel(), ON_CPU.ops(), ON_CPU.made
    cache = CacheEngine(model.kv_groups, BLOCK, NUM_BLOCKS, NUM_HOST_BLOCKS, torch.float32, device)
    forward = ForwardRunner(cast("Any", model), ops, ON_CPU.device)
    table = TableMirror(NUM_ROWS, MAX_LEN + 8, BLOCK, 1)
    return ModelRunner(forward, table, cache, device, speculator, place=place)


SAMPLES, FOLLOWS = RankPlace(0, 2), RankPlace(1, 2)


def test_it_returns_the_step_and_the_checksum_alone() -> None:
    first, second = runner(SAMPLES), runner(FOLLOWS)
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2)
    one = step(1, [(0, 0, 5)], admitted=(row_init(0, [3, 1, 4, 1, 5], [7, 3], params),))
    theirs, mine = first.run(one), second.run(one)
    assert theirs.prompt_logprobs
    assert theirs.logprobs is not None
    assert theirs.num_sampled.tolist() == [1]
    assert mine.step == 1
    assert mine.checksum == theirs.checksum != 0
    assert not mine.sampled.size
    assert not mine.num_sampled.size
    assert mine.logprobs is None
    assert not mine.prompt_logprobs
    assert not mine.failed


def test_the_checksum_shows_a_row_of_another_length() -> None:
    first, second = runner(SAMPLES), runner(FOLLOWS)
    one = step(1, [(0, 0, 5)], admitted=(row_init(0, [3, 1, 4, 1, 5], [7, 3], GREEDY),))
    first.run(one)
    second.run(one)
    untold = step(2, [(0, 5, 1)])  # it names no token for the rank that does not sample
    assert first.run(untold).checksum != second.run(untold).checksum


def test_one_rank_computes_no_checksum() -> None:
    alone = runner(RankPlace())
    assert alone.run(step(1, [(0, 0, 2)], admitted=(row_init(0, [3, 1], [7], GREEDY),))).checksum == 0


def test_it_computes_the_same_with_drafts_forks_beams_preemption_and_swaps() -> None:
    """Both ranks hold the whole model here, so all of their memory must be equal after each step."""
    sampling = Speculator(draft_setup(3), NgramDrafter(1, 4), MAX_LEN, NUM_ROWS)
    first, second = runner(SAMPLES, sampling), runner(FOLLOWS)
    options = SchedulerOptions(
        max_num_seqs=NUM_ROWS, max_num_batched_tokens=16, preemption_mode=PreemptionMode.AUTO, has_followers=True
    )
    cache = CacheConfig(block_size=BLOCK)
    scheduler = Scheduler(
        options, cache, PagedSumModel().kv_groups, NUM_BLOCKS, MAX_LEN, VirtualClock(), num_host_blocks=NUM_HOST_BLOCKS
    )
    repeated = [5, 6, 7, 8] * 4
    scheduler.add_request(request(0, repeated, SamplingParams(temperature=0.0, max_tokens=30)))
    scheduler.add_request(request(1, [9, 8, 7], SamplingParams(temperature=1.0, n=3, max_tokens=20), 100))
    searched = SamplingParams(n=2, max_tokens=12, beam_search=BeamSearchOptions())
    scheduler.add_request(request(2, [1, 2, 3, 4, 5], searched))
    penalized = SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=25)
    scheduler.add_request(request(3, repeated[:9], penalized))
    seen: dict[str, int] = {"drafts": 0, "forks": 0, "beams": 0, "swaps": 0, "preempted": 0}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        result, followed = first.run(output), second.run(output)
        assert followed.checksum == result.checksum
        for mine, theirs in zip(second._cache.layers, first._cache.layers, strict=True):
            assert torch.equal(mine.k, theirs.k)
        seen["drafts"] += len(output.drafts)
        seen["forks"] += len(output.forks)
        seen["beams"] += len(output.beams.rows)
        seen["swaps"] += len(output.swap_out)
        seen["preempted"] += len(output.preempted)
        scheduler.update_from_output(output, result)
    assert all(seen.values()), seen
