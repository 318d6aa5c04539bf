"""Beam search: the search itself against plain lists, and its blocks, preemptions and failures in the scheduler."""

from dataclasses import replace

import numpy as np
import pytest

from pagoda.base.config import CacheConfig, PreemptionMode
from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import BeamSearchOptions, BeamSearchParams, SamplingParams
from pagoda.core.beams import BeamSearch, Candidates, columns_of
from pagoda.core.events import Event, Pinned
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Pin, Request, RequestStatus, num_beam_candidates
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import MASKED_LOGPROB
from tests.core.plain_beam_search import plain_beam_search
from tests.core.traffic import Failure, Setting, Traffic, make_request

VOCAB = 12


def beams(n: int, max_tokens: int = 10, **fields: object) -> SamplingParams:
    options = {name: fields.pop(name) for name in ("length_penalty", "early_stopping") if name in fields}
    return SamplingParams(n=n, max_tokens=max_tokens, beam_search=BeamSearchOptions(**options), **fields)  # type: ignore[arg-type]


def make_traffic(
    num_blocks: int, num_host_blocks: int = 0, max_model_len: int = 64, *, caches: bool = False, **options: object
) -> Traffic:
    scheduler = SchedulerOptions(**{"max_num_seqs": 8, "max_num_batched_tokens": 600, **options})  # type: ignore[arg-type]
    cache = CacheConfig(block_size=4, enable_prefix_caching=caches, watermark=0.0)
    return Traffic(Setting(scheduler, cache, (KVGroupSpec(),), num_blocks, num_host_blocks, max_model_len, beams=True))


@pytest.mark.parametrize("seed", range(40))
def test_beam_search_equals_one_over_plain_lists(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = beams(
        int(rng.integers(1, 6)),
        length_penalty=float(rng.choice([0.0, 0.7, 1.0, 3.0, -1.0])),
        early_stopping=[False, True, "never"][int(rng.integers(3))],
        stop_token_ids=(3,) if rng.random() < 0.5 else (),
    )
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs_of(tokens: list[int]) -> list[float]:
        values = rng.normal(0, 2, VOCAB) + np.where(np.arange(VOCAB) < 2, 2.0, 0.0)  # endings are likely
        found = known.setdefault(tuple(tokens), (values - np.log(np.exp(values).sum())).astype(np.float32))
        return found.tolist()

    request = Request("r", np.array([5], np.int32), params, eos_token_ids=(0, 1))
    search = BeamSearch(request, 10)
    texts: dict[int, list[int]] = {0: [5]}
    count = num_beam_candidates(params, (0, 1))
    while not search.is_done:
        for slot, text in texts.items():
            logprobs = np.array(logprobs_of(text), np.float32)
            best = np.argsort(-logprobs, kind="stable")[:count]
            search.take(slot, Candidates(best.astype(np.int32), logprobs[best]))
        assert search.is_ready
        texts = {one.slot: [*texts[one.source], one.token_id] for one in search.extend()}
    expected = plain_beam_search([5], params, (0, 1), 10, logprobs_of)
    assert [(one.score, columns_of(one)[0].tolist()) for one in search.finished] == expected


def test_tokens_that_a_grammar_forbids_are_never_taken() -> None:
    search = BeamSearch(Request("r", np.array([5], np.int32), beams(3), eos_token_ids=(0,)), 10)
    masked = np.float32(MASKED_LOGPROB)
    search.take(0, Candidates(np.array([7, 8, 1, 2], np.int32), np.array([-1, -2, masked, masked], np.float32)))
    assert [one.token_id for one in search.extend()] == [7, 8]
    only_the_end = Candidates(np.array([0, 1, 2, 3], np.int32), np.array([0, masked, masked, masked], np.float32))
    for beam in search.live:
        search.take(beam.slot, only_the_end)
    assert search.extend() == []
    assert search.is_done
    assert [columns_of(one)[0].tolist() for one in search.finished] == [[7, 0], [8, 0]]
    assert {one.status for one in search.finished} == {RequestStatus.FINISHED_STOPPED}


def test_beams_of_a_long_prompt_hold_little_more_than_one_prompt() -> None:
    """500 tokens in blocks of 16 are 32 blocks; five beams of 30 tokens have at most three more each."""
    scheduler = SchedulerOptions(max_num_seqs=5, max_num_batched_tokens=600)
    cache = CacheConfig(block_size=16, enable_prefix_caching=False, watermark=0.0)
    traffic = Traffic(Setting(scheduler, cache, num_blocks=64, max_model_len=600, beams=True))
    traffic.add(make_request(1, [place % 7 for place in range(500)], beams(5, 30)))
    held: list[int] = []
    copied = 0
    while traffic.scheduler.has_unfinished_requests():
        traffic.plan()
        held += traffic.scheduler.num_blocks_held(traffic.requests["r1"].key)
        copied += len(traffic.outputs[-1].beams.copies)
        traffic.deliver()
    assert copied > 10
    assert held[0] == 32
    assert max(held) <= 32 + 5 * 3
    traffic.drain()


def test_a_search_pins_what_its_beams_leave_at_its_end_and_nothing_before() -> None:
    traffic = make_traffic(40, caches=True)
    heard: list[Event] = []
    traffic.scheduler.subscribe(heard.append)
    traffic.add(replace(make_request(1, [1] * 9, beams(3, 20)), pin=Pin(60)))
    while traffic.scheduler.has_unfinished_requests():
        assert not any(isinstance(event, Pinned) for event in heard)
        traffic.step()
    assert sum(len(output.beams.copies) for output in traffic.outputs) > 0
    assert [event.sequence for event in heard if isinstance(event, Pinned)] == [0, 1, 2]
    traffic.drain()


@pytest.mark.parametrize("num_host_blocks", [0, 60])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_search_has_the_same_result(num_host_blocks: int, depth: int) -> None:
    """Two searches outgrow the pool together: the newer one is swapped, or begins again. Traffic knows the result."""
    mode = PreemptionMode.SWAP if num_host_blocks else PreemptionMode.RECOMPUTE
    traffic = make_traffic(22, num_host_blocks, preemption_mode=mode, pipeline_depth=depth, async_scheduling=depth > 1)
    for number in (1, 2):
        traffic.add(make_request(number, [number] * 17, beams(3, 20)))
    traffic.drain()
    stats = traffic.scheduler.make_stats()
    assert stats.preemptions > 0
    assert stats.swap_outs == (stats.preemptions if num_host_blocks else 0)


def test_a_beam_search_that_outgrows_the_pool_ends_with_all_its_beams() -> None:
    traffic = make_traffic(7)
    traffic.add(make_request(1, [1] * 17, beams(3, 30)))
    traffic.drain()
    finishes = [traffic.received["r1", sequence].finish for sequence in range(3)]
    assert {finish.status for finish in finishes if finish is not None} == {RequestStatus.FINISHED_LENGTH_CAPPED}
    assert all(finish is not None and "7 KV blocks" in str(finish.message) for finish in finishes)


@pytest.mark.parametrize("fault", ["not finite", "no logprobs"])
def test_a_beam_that_fails_ends_its_beam_search(fault: str) -> None:
    traffic = make_traffic(30)
    traffic.add(make_request(1, [1] * 9, beams(3)))
    traffic.add(make_request(2, [2] * 9, SamplingParams(max_tokens=20)))
    for _ in range(3):
        traffic.step()
    if fault == "no logprobs":
        traffic.twin = None  # it knows no such worker
        traffic.plan()
        output, result, failure = traffic.in_flight.pop()
        traffic.in_flight.append((output, replace(result, logprobs=None), failure))
    else:
        traffic.plan(lambda output: Failure(frozenset({int(output.sample_rows[1])})))
    ended = [finish for outputs in traffic.deliver().values() for finish in outputs.ends]
    assert sorted(finish.sequence for finish in ended) == [0, 1, 2]
    expected = RequestStatus.FINISHED_IGNORED if fault == "no logprobs" else RequestStatus.FINISHED_ERROR
    assert {finish.status for finish in ended} == {expected}
    traffic.drain()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
    ],
)
def test_params_without_meaning_in_beam_search_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        beams(2, **fields)
    assert caught.value.param == named


def test_vllms_beam_search_params_become_sampling_params() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=7, length_penalty=0.5, early_stopping="never").sampling_params()
    assert (params.n, params.max_tokens, params.temperature) == (4, 7, 0.0)
    assert params.beam_search == BeamSearchOptions(0.5, "never")
    with pytest.raises(RequestError, match="beam_width"):
        BeamSearchParams(0, 7)
