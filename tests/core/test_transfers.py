"""Blocks of a tier: requests wait for them or compute them, whichever is sooner, and get the same tokens."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagoda.base.config import CacheConfig, PreemptionMode
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Event, Held, Loaded, TierChanged
from pagoda.core.request import LoraRef, Pin, Reason
from pagoda.core.scheduler_options import SchedulerOptions
from tests.core.slow_tier import SlowTier
from tests.core.traffic import VOCABULARY, Failure, Setting, Traffic, make_request

PROMPT = [1, 2, 3, 4] * 5 + [1]  # five full blocks
OPTIONS = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=32, prefix_hash_seed=1)


class Bench(Traffic):
    """Traffic with a tier. Its twin knows none."""

    def __init__(self, tier: SlowTier, num_blocks: int, options: SchedulerOptions, host: int = 0) -> None:
        cache = CacheConfig(block_size=4, watermark=0.0)
        super().__init__(Setting(options, cache, num_blocks=num_blocks, num_host_blocks=host, max_model_len=40), tier)
        self.twin = None
        self.tier, tier.worker = tier, self.worker
        self.heard: list[Event] = []
        self.scheduler.subscribe(self.heard.append, cache=True)

    def ask(self, number: int, prompt: list[int] = PROMPT, max_tokens: int = 3, **facts: Any) -> None:
        self.add(make_request(number, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **facts))

    def serve(self, number: int, prompt: list[int] = PROMPT, max_tokens: int = 3, **facts: Any) -> None:
        self.ask(number, prompt, max_tokens, **facts)
        self.drain()
        self.tier.write()

    def drain(self, limit: int = 400) -> None:
        """Nothing that waits for the tier waits for ever."""
        while self.tier.loads:
            self.tier.read()
        self.tier.is_quick = True
        super().drain(limit)
        self.tier.is_quick = False

    def heard_of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.heard if isinstance(event, kind)]

    def num_cached_of(self, number: int) -> int:
        return self.num_cached[self.requests[f"r{number}"].key]


@pytest.fixture
def tier() -> SlowTier:
    """A tier that has the blocks of PROMPT, of an engine that has ended."""
    tier = SlowTier()
    bench(tier).serve(0)
    assert len(tier.content) == 5
    return tier


def bench(tier: SlowTier, num_blocks: int = 20) -> Bench:
    return Bench(tier, num_blocks, OPTIONS)


def test_a_forced_reset_also_takes_the_blocks_of_loads(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.ask(1)
    traffic.step()
    assert not traffic.reset(preempt_running=False)
    assert traffic.reset(preempt_running=True)
    assert traffic.scheduler.make_stats().num_free_blocks == 20
    traffic.drain()
    assert traffic.num_cached_of(1) == 20, "it asks the tier again"


def test_a_request_waits_for_its_blocks_and_finds_them(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.ask(1)
    assert traffic.step().is_empty
    (held,) = traffic.heard_of(Held)
    assert held.reason is Reason.TRANSFER  # type: ignore[union-attr]
    assert traffic.scheduler.make_stats().num_deferred == 1
    tier.read(3)
    assert traffic.step().is_empty, "it is not done"
    tier.read()
    output = traffic.step()
    assert output.admitted[0].num_computed == 20
    assert output.num_new.tolist() == [1]
    traffic.drain()
    (loaded,) = traffic.heard_of(Loaded)
    assert (loaded.num_tokens, loaded.num_loaded, loaded.why) == (20, 20, "")  # type: ignore[union-attr]
    stats = traffic.scheduler.make_stats()
    assert (stats.tier_queries, stats.tier_hits, stats.prefix_hits) == (20, 20, 20)


def test_others_pass_a_request_that_waits_for_blocks(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.ask(1)
    traffic.ask(2, [5] * 9)
    output = traffic.step()
    assert [init.request_id for init in output.admitted] == ["r2"]
    tier.read()
    assert [init.request_id for init in traffic.step().admitted] == ["r1"]
    traffic.drain()


def test_a_load_continues_what_the_pool_has(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.serve(1, PROMPT[:9])
    traffic.ask(2)
    traffic.step()
    assert len(tier.loads[0].blocks) == 3
    traffic.ask(3, [5] * 39, 1)  # takes all that is free, and may not take what the load continues
    traffic.step()
    tier.read()
    traffic.drain()
    assert traffic.heard_of(Loaded)[-1].num_loaded == 12  # type: ignore[union-attr]


@pytest.mark.parametrize("num_loaded", [0, 2])
def test_what_cannot_be_loaded_is_computed(tier: SlowTier, num_loaded: int) -> None:
    traffic = bench(tier)
    traffic.ask(1)
    traffic.step()
    tier.read(num_loaded)
    tier.read(1, why="a record is damaged")
    output = traffic.step()
    assert output.admitted[0].num_computed == 4 * num_loaded
    traffic.drain()
    (loaded,) = traffic.heard_of(Loaded)
    assert (loaded.num_loaded, loaded.why) == (4 * num_loaded, "a record is damaged")  # type: ignore[union-attr]
    assert not tier.loads, "it is asked once"


def test_a_load_that_takes_too_long_is_given_up(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.ask(1)
    traffic.step()
    tier.read(2)
    traffic.clock.advance(10.0)
    output = traffic.step()
    assert output.admitted[0].num_computed == 8
    before = dict(traffic.worker.device)
    tier.read()
    assert traffic.worker.device == before, "nothing is written once it is stopped"
    traffic.drain()
    assert traffic.heard_of(Loaded)[0].why == "not in time"  # type: ignore[union-attr]
    # It is known to be slow: the next request computes its blocks, until that is forgotten.
    for number, is_tried in ((2, False), (3, True)):
        traffic.clock.advance(61.0 if is_tried else 0.0)
        assert traffic.reset(preempt_running=False)
        traffic.ask(number)
        traffic.step()
        assert bool(tier.loads) is is_tried
        tier.read()
        traffic.drain()


def test_what_is_sooner_computed_is_not_loaded(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.serve(1, [6] * 30)
    transfers = traffic.scheduler._state.kv.transfers
    transfers._measured.append((1, 1.0))
    transfers._measured_at_s = traffic.clock.now()
    traffic.ask(2)
    assert traffic.step().admitted
    assert not tier.loads
    traffic.drain()


def test_an_abort_frees_the_blocks_at_once(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.ask(1)
    traffic.step()
    tier.read(1)
    traffic.abort(["r1"])
    assert traffic.scheduler.make_stats().num_free_blocks == 20
    before = dict(traffic.worker.device)
    tier.read()
    assert traffic.worker.device == before
    traffic.drain()


def test_no_more_wait_than_may_run(tier: SlowTier) -> None:
    traffic = bench(tier, num_blocks=60)
    for number in range(1, 6):
        traffic.ask(number, max_tokens=1)
    traffic.step()
    assert len(tier.loads) == 4
    traffic.drain()


def test_blocks_of_steps_that_failed_are_not_kept() -> None:
    tier = SlowTier()
    traffic = bench(tier)
    traffic.ask(1)
    traffic.plan(lambda output: Failure())
    traffic.deliver()
    tier.write()
    assert not tier.content
    traffic.drain()


def test_blocks_are_kept_once_their_step_is_complete() -> None:
    tier = SlowTier()
    options = replace(OPTIONS, pipeline_depth=2, async_scheduling=True)
    traffic = Bench(tier, 20, options)
    traffic.ask(1, max_tokens=8)
    traffic.plan()
    tier.write()
    assert not tier.content
    traffic.plan()
    traffic.deliver()
    tier.write()
    assert not tier.content, "the second step may have filled it"
    traffic.deliver()
    tier.write()
    assert len(tier.content) == 5
    traffic.drain()


def test_a_block_that_was_filled_again_is_not_kept() -> None:
    tier = SlowTier()
    traffic = bench(tier, 10)
    traffic.ask(1)
    traffic.drain()
    traffic.ask(2, [6] * 30)
    traffic.drain()
    tier.write()
    assert all(names[0] is not None for names in tier.content.values())
    again = bench(tier)
    again.ask(1)
    again.ask(2, [6] * 30)
    for _ in range(3):
        again.step()
        tier.read()
    again.drain()


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_blocks_of_a_pin_are_kept_once_the_tier_has_them(tier: SlowTier, max_tokens: int, depth: int) -> None:
    """Also those of the last step."""
    traffic = Bench(tier, 20, replace(OPTIONS, pipeline_depth=depth, async_scheduling=depth > 1))
    traffic.serve(1, [6] * 9, max_tokens=max_tokens, pin=Pin(60, "me"))
    assert len(tier.kept) == 2


def test_the_blocks_of_a_pin_are_kept_after_an_abort_without_a_further_step(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.ask(1, [6] * 9, pin=Pin(60, "me"))
    traffic.step()
    traffic.abort(["r1"])
    tier.write()
    assert len(tier.kept) == 2


def test_what_was_loaded_is_offered_to_all_parts_of_the_tier(tier: SlowTier) -> None:
    """One may have it no longer, or not yet."""
    traffic = bench(tier)
    traffic.ask(1)
    traffic.step()
    tier.read()
    traffic.step()
    tier.content.clear()
    tier.write()
    assert len(tier.content) == 5
    traffic.drain()


def test_blocks_of_adapters_are_kept_by_what_these_are(tier: SlowTier) -> None:
    traffic = bench(tier)
    before = len(tier.content)
    traffic.serve(2, [5] * 9, lora=LoraRef("a", "/a"))
    assert len(tier.content) == before, "the files of a name may change"
    traffic.serve(3, [5] * 9, lora=LoraRef("a", "/a", "digest"))
    assert len(tier.content) == before + 2


def test_events_of_the_cache_name_the_tier(tier: SlowTier) -> None:
    traffic = bench(tier)
    traffic.serve(1, [6] * 9)
    tier.lose(random.Random(0))
    traffic.plan()
    traffic.deliver()
    changes = [event for event in traffic.heard if isinstance(event, TierChanged)]
    assert sum(len(event.stored) for event in changes) == 5 + 2
    assert sum(len(event.lost) for event in changes) == 1
    stats = traffic.scheduler.make_stats()
    assert (stats.num_tier_stored, stats.num_tier_lost) == (7, 1)


@pytest.mark.parametrize("seed", range(10))
def test_random_traffic_gets_the_same_tokens(seed: int) -> None:
    """Traffic compares each token with what the request gets alone, and each slot that is read with what it must hold.

    The tier loads late, in parts or not at all, loses blocks, and outlives engines; steps fail.
    """
    rng, tier = random.Random(seed), SlowTier()
    num_hits = 0
    for life in range(3):
        depth = rng.choice([1, 1, 2])
        options = SchedulerOptions(
            max_num_seqs=rng.choice([2, 4]),
            max_num_batched_tokens=rng.choice([8, 24]),
            prefix_hash_seed=7,
            pipeline_depth=depth,
            async_scheduling=depth > 1,
            admit_whole_prompt=rng.random() < 0.7,
            preemption_mode=rng.choice([PreemptionMode.RECOMPUTE, PreemptionMode.SWAP]),
        )
        tier.loads.clear()
        traffic = Bench(tier, rng.choice([12, 16, 40]), options, host=rng.choice([0, 20]))
        prompts = [random.Random(number).choices(range(VOCABULARY), k=30) for number in range(3)]
        for number in range(100 * life, 100 * life + 12):
            prompt = rng.choice(prompts)[: rng.randrange(6, 30)]
            sampling = SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.randrange(1, 8), ignore_eos=True)
            traffic.add(make_request(number, prompt, sampling))
            for _ in range(rng.randrange(4)):
                _happen(rng, traffic, tier)
        for _ in range(120):
            _happen(rng, traffic, tier)
        traffic.drain()
        num_hits += traffic.scheduler.make_stats().tier_hits
        tier._writes.clear()
    assert num_hits or seed, "the first of these finds some"


def _happen(rng: random.Random, traffic: Bench, tier: SlowTier) -> None:
    what = rng.random()
    if what < 0.02:
        tier.lose(rng)
    elif what < 0.04 and traffic.requests:
        traffic.abort([rng.choice(list(traffic.requests))])
    elif what < 0.06:
        traffic.reset(preempt_running=rng.random() < 0.5)
    elif what < 0.08:
        traffic.clock.advance(rng.choice([0.1, 11.0]))
    if rng.random() < 0.5:
        tier.write(rng.randrange(6))
    if rng.random() < 0.5:
        tier.read(rng.randrange(4), why="damaged" if rng.random() < 0.05 else "")
    if len(traffic.in_flight) < traffic.depth:
        traffic.plan(lambda output: _failure(rng, output.rows))
    if traffic.in_flight and (len(traffic.in_flight) >= traffic.depth or rng.random() < 0.5):
        traffic.deliver()


def _failure(rng: random.Random, rows: np.ndarray) -> Failure | None:
    if rng.random() > 0.03:
        return None
    return Failure() if rng.random() < 0.5 else Failure(frozenset(rows[:1].tolist()))
