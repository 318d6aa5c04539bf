"""Random traffic with failures over random settings: the contract holds after every call, and all text is the same.

`tests.core.traffic` does the checking. The default profile is small; `-m slow` runs long ones.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pagoda.base.config import CacheConfig, PreemptionMode, SchedulingMode, SchedulingPolicy
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec, KVShape
from pagoda.core.request import PLACEHOLDER_ID, LoraRef, MediaItem, Pin, PromptEmbeds, Reason
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import SchedulerOutput
from tests.core.traffic import VOCABULARY, Failure, Setting, Traffic, make_request

FULL = KVGroupSpec()
WIDE = KVGroupSpec(shape=KVShape(1, 300, 300))


def window(size: int, layer: int = 1, shape: KVShape | None = None) -> KVGroupSpec:
    return KVGroupSpec(KVGroupKind.WINDOW, window=size, layers=(layer,), shape=shape or KVShape())


CROSS = KVGroupSpec(KVGroupKind.CROSS, layers=(1,))


def state(layer: int = 1, size: int = 1) -> KVGroupSpec:
    return KVGroupSpec(KVGroupKind.STATE, window=STATE_WINDOW, layers=(layer,), shape=KVShape(1, size, 0))


GROUPS = st.sampled_from(
    [
        (FULL,),
        (FULL,),
        (window(8, 0),),
        (window(5, 0),),
        (FULL, window(8)),
        (FULL, window(6), window(3, 2)),
        (state(0),),
        (FULL, state()),
        (FULL, window(6), state(2)),
        (FULL, state(1, 2000)),  # a snapshot every two blocks, in a pool that has few of them
        (WIDE, window(6, 1, WIDE.shape), state(2, 4000)),  # every four blocks
        (state(0, 4000),),
    ]
)


ADAPTERS = (
    LoraRef("a"),
    LoraRef("b"),
    LoraRef("c", "/c", "1"),
    LoraRef("again c", "/again", "1"),  # the same adapter
    LoraRef("c", "/c", "2"),  # another one, by the same name
)


@st.composite
def setting_of(draw: st.DrawFn, mode: SchedulingMode) -> Setting:
    num_seqs = draw(st.integers(1, 5))
    max_model_len = draw(st.sampled_from([24, 40]))
    phased = mode is SchedulingMode.PHASED
    budget = draw(
        st.sampled_from([24, 40] if phased else [num_seqs, 8, 12, 24]).filter(lambda tokens: tokens >= num_seqs)
    )
    cuts_prompts = phased or draw(st.integers(0, 7)) > 0
    budget = budget if cuts_prompts else max_model_len
    groups = draw(GROUPS)
    depth = draw(st.sampled_from([1, 1, 2, 3]))
    kind = draw(st.sampled_from(["async", "plain", "stages"])) if depth > 1 else "plain"
    is_async = kind == "async"
    media = draw(st.integers(0, 3)) == 0
    encoder_decoder = not media and draw(st.integers(0, 7)) == 0
    no_partial_media = draw(st.booleans())
    scheduler = SchedulerOptions(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        scheduling_mode=mode,
        scheduling_policy=draw(st.sampled_from(SchedulingPolicy)),
        preemption_mode=draw(st.sampled_from(PreemptionMode)),
        enable_chunked_prefill=cuts_prompts,
        admit_whole_prompt=draw(st.booleans()),
        max_num_partial_prefills=draw(st.sampled_from([0, 0, 1])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 5])),
        prefill_beside_decodes=draw(st.sampled_from([0, 0, 2, 3])) if cuts_prompts and not no_partial_media else 0,
        max_loras=draw(st.sampled_from([0, 1, 2])),
        pipeline_depth=depth,
        async_scheduling=is_async,
        num_stages=depth if kind == "stages" else 1,
        has_followers=not is_async and draw(st.booleans()),
        evict_for_priority=draw(st.booleans()),
        encoder_budget=6 if media or encoder_decoder else 0,
        encoder_cache_tokens=9 if media else 64 * encoder_decoder,
        no_partial_media=no_partial_media,
        check_invariants=draw(st.booleans()),
        decision_log_steps=draw(st.sampled_from([0, 4])),
        scheduler_delay_factor=draw(st.sampled_from([0.0, 0.0, 0.5])),
    )
    cache = CacheConfig(
        block_size=4,
        enable_prefix_caching=draw(st.booleans()) and not encoder_decoder,
        watermark=draw(st.sampled_from([0.0, 0.1])),
    )
    return Setting(
        scheduler,
        cache,
        (FULL, CROSS) if encoder_decoder else groups,
        num_blocks=draw(st.integers(4, 14)) * (1 if len(groups) == 1 else 2),
        num_host_blocks=draw(st.sampled_from([0, 3, 12, 40])),
        max_model_len=max_model_len,
        encoder_decoder=encoder_decoder,
        beams=draw(st.integers(0, 2)) == 0,
        drafts=draw(st.booleans()),
    )


FAILURES = st.tuples(st.sampled_from([*[""] * 6, "step", "row", "rows"]), st.integers(0, 7))


def failure_of(kind: str, which: int) -> Callable[[SchedulerOutput], Failure | None]:
    """How the next planned step ends: it raises, or one row or every second row of it fails alone."""

    def choose(output: SchedulerOutput) -> Failure | None:
        rows = sorted({*output.rows.tolist(), *output.sample_rows.tolist()})
        if kind == "step":
            return Failure()
        if kind == "row":
            return Failure(frozenset({rows[which % len(rows)]}))
        return Failure(frozenset(rows[which % 2 :: 2])) if kind == "rows" else None

    return choose


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, drafts, resets, and steps that come back late."""

    mode = SchedulingMode.MIXED

    def __init__(self) -> None:
        super().__init__()
        self.traffic: Traffic
        self.count = 0

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.traffic = Traffic(data.draw(setting_of(self.mode)))

    @precondition(lambda self: self.count < 12)
    @rule(
        length=st.integers(1, 18),
        shared=st.integers(0, 18),
        flavour=st.integers(0, 1),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(0, 12),
        min_tokens=st.sampled_from([0, 0, 2]),
        ends=st.sampled_from([(), (), (1,), (2, 3)]),
        priority=st.integers(0, 2),
        lora=st.sampled_from([None, None, None, *ADAPTERS]),
        salt=st.sampled_from([None, None, "s"]),
        pin=st.sampled_from([None, None, Pin(1, "a"), Pin(2, "a"), Pin(3, "b")]),
        skip=st.sampled_from([False, False, True]),
        penalty=st.sampled_from([0.0, 1.0, 1.0, -1.0]),
        early=st.sampled_from([False, True, "never"]),
        is_pooled=st.sampled_from([False, False, False, True]),
        embedded=st.sampled_from([*[(0, 0, 1)] * 4, (0, 3, 1), (0, 9, 1), (0, 18, 1), (2, 7, 1), (1, 20, 3)]),
        lacks=st.sampled_from([*[None] * 8, Reason.GRAMMAR, Reason.ADAPTER, Reason.ADAPTER, Reason.NEVER]),
        places=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 2)), max_size=2),
    )
    def arrive(
        self,
        length: int,
        shared: int,
        flavour: int,
        n: int,
        max_tokens: int,
        min_tokens: int,
        ends: tuple[int, ...],
        priority: int,
        lora: LoraRef | None,
        salt: str | None,
        pin: Pin | None,
        skip: bool,
        penalty: float,
        early: bool | Literal["never"],
        is_pooled: bool,
        embedded: tuple[int, int, int],
        lacks: Reason | None,
        places: list[tuple[int, int, int]],
    ) -> None:
        setting = self.traffic.setting
        self.count += 1
        if (
            max_tokens == 0 and n > 1 and not setting.beams
        ):  # only scored: its prompt may be as long as the model allows
            length = setting.max_model_len
            if setting.scheduler.scheduling_mode is SchedulingMode.PHASED:  # which ignores more than a step takes
                length = min(length, setting.scheduler.max_num_batched_tokens)
        prompt = [(7 * flavour + place) % VOCABULARY for place in range(length)]
        prompt[shared:] = [(self.count + place) % VOCABULARY for place in range(len(prompt[shared:]))]
        embeds = None
        positions = np.arange(length, dtype=np.int32)[slice(*embedded)]
        if len(positions) and not setting.scheduler.encoder_budget:
            embeds = PromptEmbeds(positions, np.array(prompt, np.float32)[positions, None])
            prompt = [PLACEHOLDER_ID if at in positions else token for at, token in enumerate(prompt)]
        media: list[MediaItem] = []
        if setting.scheduler.encoder_budget and not setting.encoder_decoder:
            for offset, size, kind in sorted(places):
                end = media[-1].offset + media[-1].length if media else 0
                if offset >= end and offset + size <= length and size <= setting.scheduler.max_num_batched_tokens:
                    media.append(MediaItem(f"{kind}/{size}", offset, size))
        n = min(n, setting.scheduler.max_num_seqs)
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=ends,
            temperature=0.0 if n == 1 else 1.0,
        )
        if setting.beams and flavour:
            options = BeamSearchOptions(penalty, early)
            sampling = SamplingParams(n=n, max_tokens=max_tokens or 1, stop_token_ids=ends[:1], beam_search=options)
        request = make_request(
            self.count,
            prompt,
            None if is_pooled else sampling,
            pooling=PoolingParams() if is_pooled else None,
            priority=priority,
            lora=lora,
            cache_salt=salt,
            pin=pin,
            skip_prefix_read=skip,
            media=tuple(media),
            prompt_embeds=embeds,
            arrival_time_s=self.traffic.clock.now() + 1e-6 * self.count,  # no two alike
            eos_token_ids=(0,) if self.count % 3 == 0 else (),
            encoder_len=length % 6 + 1 if setting.encoder_decoder else 0,
        )
        if setting.encoder_decoder:
            request = replace(request, media=(MediaItem(f"audio{self.count}", 0, request.encoder_len),))
        self.traffic.add(request, lacks)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        """Pins end with time."""
        self.traffic.clock.advance(seconds)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.integers(1, self.count + 1), min_size=1, max_size=2))
        ended = self.traffic.ended_ids()
        ids = [f"r{number}" for number in numbers]
        self.traffic.abort([request_id for request_id in ids if request_id not in ended])

    @precondition(lambda self: self.traffic.readiness.missing)
    @rule(which=st.integers(0, 11))
    def get_ready(self, which: int) -> None:
        missing = list(self.traffic.readiness.missing)
        self.traffic.readiness.get_ready(missing[which % len(missing)])

    @rule(which=st.integers(0, 11))
    def lose(self, which: int) -> None:
        """The adapter of a request that does not run gives way to others."""
        waiting = [*self.traffic.scheduler.waiting_ids(), *self.traffic.scheduler.swapped_ids()]
        if waiting:
            key = self.traffic.requests[waiting[which % len(waiting)]].key
            self.traffic.readiness.missing.setdefault(key, Reason.ADAPTER)

    @rule(which=st.integers(0, 11))
    def stop(self, which: int) -> None:
        texts = [
            key
            for key, one in self.traffic.received.items()
            if one.tokens and not one.finish and not one.is_stopped and key[0] not in self.traffic.aborted
        ]
        if texts:
            self.traffic.stop(*texts[which % len(texts)])

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running: bool) -> None:
        self.traffic.reset(preempt_running)

    @rule(failure=FAILURES)
    def plan(self, failure: tuple[str, int]) -> None:
        if len(self.traffic.in_flight) >= self.traffic.depth:
            self.traffic.deliver()
        self.traffic.plan(failure_of(*failure))

    @precondition(lambda self: self.traffic.in_flight)
    @rule()
    def deliver(self) -> None:
        self.traffic.deliver()

    @rule(times=st.integers(1, 4), right=st.integers(0, 3), failure=FAILURES)
    def step(self, times: int, right: int, failure: tuple[str, int]) -> None:
        """The ordinary loop: plan, apply the result, offer drafts of which the first `right` are right.

        The last one of the steps may fail.
        """
        for left in range(times, 0, -1):
            if len(self.traffic.in_flight) >= self.traffic.depth:
                self.traffic.deliver()
            self.traffic.plan(failure_of(*failure) if left == 1 else failure_of("", 0))
            self._offer_drafts(right)

    def _offer_drafts(self, right: int) -> None:
        if not self.traffic.setting.drafts or self.traffic.setting.scheduler.async_scheduling:
            return
        for (request_id, sequence), received in self.traffic.received.items():
            if received.finish is None:
                # Of a beam, too: the scheduler drops them.
                ahead = received.truth[len(received.tokens) :][1:4]
                guess = ahead[:right] + [(token + 1) % VOCABULARY for token in ahead[right:]]
                if guess:
                    self.traffic.draft(request_id, guess, sequence)

    def teardown(self) -> None:
        if hasattr(self, "traffic") and sys.exc_info()[0] is None:
            while self.traffic.in_flight:
                self.traffic.deliver()
            self.traffic.drain()


class PhasedMachine(SchedulerMachine):
    """The same where a step is all prompts or all decodes."""

    mode = SchedulingMode.PHASED


CALM = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
QUICK = settings(CALM, max_examples=100, stateful_step_count=25, derandomize=True)  # the same traffic every time
DEEP = settings(CALM, max_examples=3000, stateful_step_count=60)


@pytest.mark.parametrize("machine", [SchedulerMachine, PhasedMachine])
def test_invariants(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


def test_siblings_that_resume_together_need_no_encoder() -> None:
    """Three outputs of a short prompt lose their first tokens to a reset: the two that share the leader's filled
    cross-attention blocks start at 0, and the encoder's budget for one of them does not hold back the other."""
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=3,
            max_num_batched_tokens=24,
            scheduling_mode=SchedulingMode.PHASED,
            admit_whole_prompt=False,
            encoder_budget=6,
            encoder_cache_tokens=64,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        (FULL, CROSS),
        num_blocks=4,
        max_model_len=24,
        encoder_decoder=True,
    )
    traffic = Traffic(setting)
    sampling = SamplingParams(n=3, max_tokens=1, temperature=1.0)
    traffic.add(make_request(1, [0, 1, 2], sampling, encoder_len=4, media=(MediaItem("audio", 0, 4),)))
    traffic.plan()
    traffic.reset(preempt_running=True)
    traffic.deliver()
    traffic.drain()


def test_siblings_that_come_back_from_the_host_need_no_encoder() -> None:
    """One of two outputs lost its first token to a reset and starts at 0, but the cross-attention blocks are filled."""
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=3,
            max_num_batched_tokens=24,
            scheduling_mode=SchedulingMode.PHASED,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            encoder_budget=6,
            encoder_cache_tokens=64,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        (FULL, CROSS),
        num_blocks=6,
        num_host_blocks=3,
        max_model_len=24,
        encoder_decoder=True,
    )
    traffic = Traffic(setting)
    for number, length, count, priority in ((1, 1, 2, 1), (2, 4, 1, 0)):
        sampling = SamplingParams(n=count, max_tokens=2, temperature=float(count > 1))
        media = (MediaItem(f"audio{number}", 0, length + 1),)
        prompt = [number] * length
        request = make_request(number, prompt, sampling, priority=priority, encoder_len=length + 1, media=media)
        traffic.add(request)
        if number == 1:
            traffic.plan()
            traffic.reset(preempt_running=True)
    traffic.deliver()
    traffic.drain()


def test_a_state_is_found_until_the_last_beam_has_passed_it() -> None:
    """The pool cannot hold the first beam's next state after it has passed one; the second ends with it, and makes what
    it holds known."""
    setting = Setting(
        SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=4),
        CacheConfig(block_size=4, enable_prefix_caching=True, watermark=0.0),
        (FULL, state(1, 2000)),
        num_blocks=8,
        max_model_len=24,
        beams=True,
    )
    traffic = Traffic(setting)
    traffic.add(make_request(1, [0], SamplingParams(max_tokens=1)))
    sampling = SamplingParams(n=2, max_tokens=11, beam_search=BeamSearchOptions(0.0, False))
    traffic.add(make_request(2, list(range(11)), sampling))
    traffic.drain()


def test_siblings_that_lost_their_first_token_find_the_window_they_need() -> None:
    """They compute the last prompt block again: what that attends to must not have been freed."""
    setting = Setting(
        SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=24, long_prefill_token_threshold=5),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        (FULL, window(8)),
        num_blocks=30,
        max_model_len=24,
    )
    traffic = Traffic(setting)
    traffic.add(make_request(1, list(range(6)), SamplingParams(max_tokens=17)))  # not alone: prompts are capped
    traffic.step()
    traffic.add(make_request(2, [0] * 16, SamplingParams(n=2, max_tokens=1, temperature=1.0)))
    while not traffic.outputs[-1].forks:
        if traffic.in_flight:
            traffic.deliver()
        traffic.plan()
    traffic.reset(preempt_running=True)
    traffic.deliver()
    traffic.drain()


def test_blocks_that_a_preempted_request_was_to_fill_in_this_step_are_not_found() -> None:
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=2,
            max_num_batched_tokens=8,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            evict_for_priority=True,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=True, watermark=0.0),
        num_blocks=4,
        max_model_len=24,
    )
    traffic = Traffic(setting)
    traffic.add(make_request(1, [0] * 13, SamplingParams(max_tokens=1), priority=1))
    traffic.step()
    traffic.add(make_request(2, [1], SamplingParams(max_tokens=1), priority=0))
    traffic.drain()


def test_a_sibling_that_is_alone_after_its_leader_failed_is_swapped_out_before_its_prompt_is_computed() -> None:
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=3,
            max_num_batched_tokens=6,
            admit_whole_prompt=False,
            preemption_mode=PreemptionMode.SWAP,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        num_blocks=7,
        num_host_blocks=8,
        max_model_len=24,
    )
    traffic = Traffic(setting)
    traffic.add(make_request(1, [0] * 14, SamplingParams(max_tokens=8)))
    for _ in range(4):
        traffic.step()
    traffic.add(make_request(2, [1] * 15, SamplingParams(max_tokens=2, n=2)))
    traffic.plan(lambda output: Failure(frozenset({int(output.rows[output.num_new.argmax()])})))
    traffic.deliver()
    for _ in range(3):
        traffic.step()
    assert traffic.scheduler.swapped_ids() == ["r2"]
    traffic.drain()


def test_equal_blocks_of_another_request_are_found_after_a_row_has_failed_alone() -> None:
    """Only what the failed row held cannot be trusted: it ends once, not once for computing and once for sampling."""
    setting = Setting(
        SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=24),
        CacheConfig(block_size=4, enable_prefix_caching=True, watermark=0.0),
        num_blocks=9,
        max_model_len=24,
    )
    traffic = Traffic(setting)
    prompt, one_token = [0] * 5, SamplingParams(max_tokens=1)
    for number, skips in ((1, False), (2, True)):  # the second computes its own blocks, which are equal
        traffic.add(make_request(number, prompt, one_token, skip_prefix_read=skips))
        traffic.step()
    traffic.add(make_request(3, prompt, one_token))
    step = traffic.plan(lambda output: Failure(frozenset(output.rows.tolist())))
    traffic.deliver()
    traffic.add(make_request(4, prompt, one_token))
    again = traffic.step()
    assert [init.num_computed for init in (*step.admitted, *again.admitted)] == [4, 4]
    traffic.drain()


def test_blocks_of_each_beam_that_fails_are_not_found() -> None:
    """The search ends with the first of them, and all its beams leave their rows."""
    setting = Setting(
        SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=24),
        CacheConfig(block_size=4, enable_prefix_caching=True, watermark=0.0),
        num_blocks=20,
        max_model_len=40,
        beams=True,
    )
    traffic = Traffic(setting)
    beams = SamplingParams(n=3, max_tokens=12, beam_search=BeamSearchOptions())
    traffic.add(make_request(1, [1] * 5, beams, pin=Pin(9, "a")))
    for _ in range(8):
        traffic.step()
    traffic.plan(lambda output: Failure(frozenset(output.rows.tolist())))
    tables, found = [row.tables[0] for row in traffic.worker.rows.values()], traffic.scheduler._state.kv.prefix_cache
    assert len({table[2] for table in tables}) == 3, "each beam has a full block of its own"
    traffic.deliver()
    assert found._hash_of.keys().isdisjoint(block for table in tables for block in table)
    traffic.drain()


def test_blocks_of_beams_that_were_preempted_before_their_row_fails_are_not_found() -> None:
    """The search began again, and does not know any more what its beams had generated."""
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            preemption_mode=PreemptionMode.RECOMPUTE,
            pipeline_depth=2,
            async_scheduling=True,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=True, watermark=0.0),
        num_blocks=16,
        max_model_len=60,
        beams=True,
    )
    blocks: set[int] = set()

    def run(failing_step: int) -> tuple[Traffic, int]:
        """Return the traffic when the beams have been preempted, and the step in which they were."""

        def fail(output: SchedulerOutput) -> Failure | None:
            kv, table = traffic.scheduler._state.kv, traffic.scheduler._state.table
            beams = [row for row in output.rows.tolist() if table.is_beam[row]]
            if output.step == failing_step:
                blocks.update(block for row in beams for block in kv.tables.of(row)[0][1:].tolist())
            return Failure(frozenset(beams)) if output.step == failing_step else None

        traffic = Traffic(setting)
        traffic.add(make_request(1, [2] * 6, SamplingParams(max_tokens=50, ignore_eos=True)))
        traffic.add(make_request(2, [1] * 5, SamplingParams(n=3, max_tokens=40, beam_search=BeamSearchOptions())))
        while not (output := traffic.plan(fail)).preempted:
            if len(traffic.in_flight) == 2:
                traffic.deliver()
        return traffic, output.step

    _, step = run(failing_step=0)
    traffic, _ = run(failing_step=step - 1)
    assert blocks
    assert len(traffic.in_flight) == 2
    traffic.deliver()
    assert traffic.scheduler._state.kv.prefix_cache._hash_of.keys().isdisjoint(blocks)
    traffic.drain()


def test_copies_of_a_step_that_computes_nothing_are_measured() -> None:
    """The second preemption is decided by what the copies of the first took, in a step of copies only."""
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=2,
            max_num_batched_tokens=8,
            admit_whole_prompt=False,
            preemption_mode=PreemptionMode.COST,
            max_num_partial_prefills=1,
            long_prefill_token_threshold=5,
            pipeline_depth=2,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        groups=(KVGroupSpec(KVGroupKind.WINDOW, window=5),),
        num_blocks=5,
        num_host_blocks=3,
        max_model_len=24,
    )
    traffic = Traffic(setting)
    traffic.add(make_request(1, [1] * 9, SamplingParams(max_tokens=2)))
    traffic.add(make_request(2, [2] * 13, SamplingParams(max_tokens=0)))
    traffic.plan()
    for _ in range(4):
        traffic.plan()
        traffic.deliver()
    traffic.deliver()
    traffic.drain()


def test_a_prompt_that_the_budget_cuts_leaves_its_share_to_the_next() -> None:
    """What keeps the next one back is then the budget, not the share of prompts: the events of both say so."""
    setting = Setting(
        SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=4, prefill_beside_decodes=3),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        num_blocks=60,
        max_model_len=40,
    )
    traffic = Traffic(setting)
    traffic.add(make_request(1, [1] * 3, SamplingParams(max_tokens=30)))
    traffic.add(make_request(2, [2] * 5, SamplingParams(max_tokens=14, n=3, temperature=1.0)))
    for _ in range(8):
        traffic.step()
    traffic.reset(preempt_running=True)  # the siblings compute what each has sampled, side by side
    traffic.drain()


def test_beams_in_flight_do_not_go_back_one_state() -> None:
    """Beams that are swapped out with their tokens in flight compute the last ones again: a state cannot."""
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=3,
            max_num_batched_tokens=24,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            preemption_mode=PreemptionMode.SWAP,
            async_scheduling=True,
            pipeline_depth=2,
            evict_for_priority=True,
        ),
        CacheConfig(block_size=4, watermark=0.0),
        groups=(state(0),),
        num_blocks=6,
        num_host_blocks=20,
        max_model_len=40,
        beams=True,
    )
    traffic = Traffic(setting)
    beams = SamplingParams(n=2, max_tokens=9, beam_search=BeamSearchOptions())
    traffic.add(make_request(1, [1] * 5, beams, priority=2))
    for _ in range(3):
        traffic.step()
    assert traffic.in_flight
    traffic.add(make_request(2, [2] * 20, SamplingParams(max_tokens=2), priority=0))
    assert traffic.plan().preempted
    while traffic.in_flight:
        traffic.deliver()
    traffic.drain()


def test_beams_come_back_from_the_host_into_a_pool_that_they_fill() -> None:
    """Their tokens in flight, which are dropped, began a block each: that is on the host, and they need no other."""
    setting = Setting(
        SchedulerOptions(
            max_num_seqs=3,
            max_num_batched_tokens=40,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            preemption_mode=PreemptionMode.SWAP,
            async_scheduling=True,
            pipeline_depth=2,
            evict_for_priority=True,
        ),
        CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
        num_blocks=4,
        num_host_blocks=20,
        max_model_len=40,
        beams=True,
    )
    traffic = Traffic(setting)
    beams = SamplingParams(n=2, max_tokens=4, beam_search=BeamSearchOptions())
    traffic.add(make_request(1, [1] * 8, beams, priority=2))
    for _ in range(3):
        traffic.step()
    traffic.add(make_request(2, [2] * 12, SamplingParams(max_tokens=2), priority=0))
    assert len(traffic.plan().swap_out) == 4
    while traffic.in_flight:
        traffic.deliver()
    assert traffic.scheduler.num_computed_tokens(traffic.requests["r1"].key) == [8, 8]
    traffic.drain()
    assert [traffic.received["r1", number].finish.message for number in range(2)] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SchedulerMachine, PhasedMachine])
def test_invariants_at_length(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=DEEP)
