"""The two modes, recompute, swap and priority, with small numbers."""

from collections import Counter

import pytest

from pagoda.base.config import PreemptionMode, SchedulingMode, SchedulingPolicy
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import AdmitKind, LoraRef, MediaItem, RequestStatus
from tests.core.rig import Rig

PHASED = SchedulingMode.PHASED
PRIORITY = SchedulingPolicy.PRIORITY
SWAP = PreemptionMode.SWAP


def test_a_step_is_all_prompts_or_all_decodes() -> None:
    rig = Rig(scheduling_mode=PHASED)
    rig.add("a", 4)
    rig.step()
    rig.add("b", 4)
    assert rig.step().scheduled == {"b": 4}
    assert rig.step().scheduled == {"a": 1, "b": 1}


def test_new_prompts_win() -> None:
    rig = Rig(scheduling_mode=PHASED, max_num_batched_tokens=30)
    rig.add("a", 4)
    rig.step()
    rig.add("b", 30)
    assert rig.step().scheduled == {"b": 30}


def test_running_sequences_count_against_max_num_seqs() -> None:
    rig = Rig(scheduling_mode=PHASED, max_num_seqs=2)
    rig.add("a", 4)
    rig.step()
    rig.add("b", 4)
    rig.add("c", 4)
    assert rig.step().scheduled == {"b": 4}


def swapped_out(**config: object) -> Rig:
    """Two requests in 5 blocks, of which b has just been swapped out."""
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=SWAP, **config)
    rig.add("a", 8, max_tokens=6)
    rig.add("b", 7, max_tokens=6)
    while not rig.swapped:
        rig.step()
    return rig


def test_a_swapped_request_blocks_new_prompts() -> None:
    rig = swapped_out(scheduling_mode=PHASED)
    rig.add("c", 1)
    assert rig.free == 2
    assert rig.step().scheduled == {"a": 1}
    assert rig.waiting == ["c"]


def test_a_step_without_an_admitted_prompt_decodes() -> None:
    rig = Rig(scheduling_mode=PHASED, num_blocks=5)
    rig.add("a", 8)
    rig.step()
    rig.add("b", 16)
    assert rig.step().scheduled == {"a": 1}


@pytest.mark.parametrize("mode", SchedulingMode)
def test_no_request_resumes_in_the_step_that_swaps_out(mode: SchedulingMode) -> None:
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=SWAP, scheduling_mode=mode)
    rig.add("a", 8)
    rig.add("b", 7)
    step = rig.step()
    while not rig.swapped:
        step = rig.step()
    assert len(step.output.swap_out) == 2
    assert len(step.output.swap_in) == 0
    assert step.kinds == {}


def test_a_decode_step_counts_unfinished_sequences() -> None:
    rig = Rig(scheduling_mode=PHASED)
    rig.add("a", 4, n=3)
    rig.add("b", 4)
    rig.step()
    assert rig.step().output.total_num_scheduled_tokens == 4


def test_delay_factor() -> None:
    rig = Rig(scheduler_delay_factor=0.5)
    rig.clock.advance(10.0)
    rig.add("a", 4, max_tokens=30, arrival_time_s=10.0)
    rig.step(duration_s=1.0)
    rig.add("b", 4, arrival_time_s=10.0)
    rig.clock.advance(0.5)
    assert set(rig.step().scheduled) == {"a"}
    rig.clock.advance(0.01)
    assert set(rig.step().scheduled) == {"a", "b"}


def test_at_once_when_nothing_runs() -> None:
    rig = Rig(scheduler_delay_factor=0.5)
    rig.add("a", 4, max_tokens=1, arrival_time_s=0.0)
    rig.step(duration_s=9.0)
    rig.add("b", 4, arrival_time_s=0.0)
    assert rig.step().scheduled == {"b": 4}


def test_decodes_continue_while_a_long_prompt_takes_the_rest() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", 4)
    rig.add("b", 4)
    rig.step()
    rig.add("c", 18)
    for _ in range(3):
        assert rig.step().scheduled == {"a": 1, "b": 1, "c": 6}


def test_running_list_is_in_admission_order() -> None:
    rig = Rig()
    rig.add("a", 9)
    rig.add("b", 4)
    step = rig.step()
    rig.add("c", 4)
    step = rig.step()
    assert list(step.scheduled) == ["a", "b", "c"] == rig.running


def test_running_then_swapped_then_new() -> None:
    rig = swapped_out()
    rig.add("c", 1, max_tokens=1)
    order = []
    while rig.scheduler.has_unfinished_requests():
        order += [name for name in rig.step().kinds if name in ("b", "c")]
    assert order == ["b", "c"]


def test_two_prompts_of_sixty() -> None:
    rig = Rig(num_blocks=100)
    rig.add("a", 60)
    rig.add("b", 60)
    assert rig.step().scheduled == {"a": 60, "b": 4}
    rig.add("c", 60)
    rig.add("d", 60)
    assert rig.step().scheduled == {"a": 1, "b": 56, "c": 7}


def test_max_num_seqs_before_budget() -> None:
    rig = Rig(num_blocks=100, max_num_seqs=2)
    for name in "abcde":
        rig.add(name, 65)
    assert [list(rig.step().scheduled.values()) for _ in range(3)] == [[64], [1, 63], [1, 2]]


def test_only_the_last_chunk_samples() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", 12)
    assert rig.step().emitted == {}
    assert rig.step().emitted == {"a": [7]}


def test_longer_than_the_budget_is_served_in_parts() -> None:
    rig = Rig(max_num_batched_tokens=32)
    rig.add("a", 48)
    assert [rig.step().scheduled["a"] for _ in range(2)] == [32, 16]


# Recompute


def test_victims_from_the_tail_until_it_fits() -> None:
    rig = Rig(num_blocks=6, max_num_batched_tokens=8, admit_whole_prompt=False)
    rig.add("a", 23, max_tokens=2)
    rig.step()
    rig.step()
    rig.add("b", 1)
    rig.add("c", 1)
    step = rig.step()
    assert step.scheduled["a"] == 7
    assert rig.running == ["a"]


def test_two_victims_in_one_step_keep_their_order() -> None:
    rig = two_small_behind_a_chunk()
    step = rig.step()
    assert step.scheduled == {"a": 8}
    assert step.preempted == ("c", "b")
    assert rig.waiting == ["b", "c"]


def two_small_behind_a_chunk() -> Rig:
    """a has 8 of 16 tokens in 2 of 4 blocks; b and c hold 1 each, and a's next 8-token chunk needs 2."""
    rig = Rig(num_blocks=4, max_num_batched_tokens=10, admit_whole_prompt=False, long_prefill_token_threshold=8)
    rig.add("a", 16, max_tokens=1)
    rig.add("b", 1)
    rig.add("c", 1)
    assert rig.step().scheduled == {"a": 8, "b": 1, "c": 1}
    return rig


def test_a_row_that_preempts_itself_does_not_stop_the_others() -> None:
    rig = Rig(num_blocks=5)
    rig.add("a", 9)
    rig.add("b", 8)
    rig.step()
    step = rig.step()
    assert step.scheduled == {"a": 1}
    assert step.preempted == ("b",)


def test_state_of_a_preempted_request() -> None:
    rig = Rig(num_blocks=5)
    rig.add("a", 8)
    rig.add("b", 8)
    rig.add("c", 9)
    rig.step()
    rig.offer({"b": [7, 7]})
    rig.step()
    assert rig.waiting[0] == "b"
    assert rig.computed("b") == 0
    assert rig.scheduler.make_stats().preemptions == 1
    assert rig.blocks("a") == [3]
    assert rig.free == 2
    step = rig.run()
    assert step["b"] == [7] * 7  # the first was emitted before


def test_resume_computes_prompt_and_output_alike() -> None:
    rig = Rig(num_blocks=5)
    rig.add("a", 8, max_tokens=6)
    rig.add("b", 7, max_tokens=3)
    rig.step()
    rig.step()
    rig.step()
    assert rig.waiting == ["b"]
    while "b" not in (step := rig.step()).scheduled:
        pass
    assert step.scheduled["b"] == 9
    assert step.kinds["b"] is AdmitKind.RESUMED
    assert step.emitted["b"] == [7]
    assert step.finished["b"] == "length"


def test_a_preempted_partial_prefill_is_recomputed() -> None:
    rig = Rig(num_blocks=7, max_num_batched_tokens=10, admit_whole_prompt=False)
    rig.add("a", 8)
    rig.step()
    rig.add("b", 20)
    assert rig.step().scheduled == {"a": 1, "b": 9}
    assert rig.computed("b") == 9
    assert rig.step().preempted == ("b",)
    assert rig.computed("b") == 0


def test_preempted_again_and_again_it_still_emits_the_same() -> None:
    rig = Rig(num_blocks=7)
    for name in "abc":
        rig.add(name, 6, max_tokens=14)
    assert rig.run() == {name: [7] * 14 for name in "abc"}
    assert rig.scheduler.make_stats().preemptions > 2


def test_a_preempted_request_finds_its_own_cached_blocks() -> None:
    rig = Rig(num_blocks=5, enable_prefix_caching=True)
    rig.add("a", 8, max_tokens=4)
    rig.add("b", 7, max_tokens=6)
    for _ in range(3):
        rig.step()
    assert rig.waiting == ["b"]
    while "b" not in (step := rig.step()).kinds:
        pass
    assert step.cached["b"] == 8
    assert step.scheduled["b"] == 1


def test_a_preempted_request_frees_its_cross_blocks() -> None:
    groups = (KVGroupSpec(), KVGroupSpec(KVGroupKind.CROSS, layers=(1,)))
    rig = Rig(num_blocks=10, groups=groups, encoder_decoder=True, encoder_budget=64, encoder_cache_tokens=64)
    for name in "ab":
        rig.add(name, 4, encoder_len=12, media=(MediaItem(name, 0, 12),))
    assert len(rig.step().output.encoder_runs) == 2
    rig.step()
    assert (rig.blocks("a"), rig.blocks("b")) == ([2, 3], [2, 3])
    for _ in range(4):
        step = rig.step()
    assert step.preempted == ("b",)
    assert rig.blocks("b") == [0, 0]
    while "b" not in (step := rig.step()).kinds:
        pass
    assert [run.content_hash for run in step.output.encoder_runs] == ["b"]


def test_each_sequence_of_a_request_that_outgrows_the_pool_keeps_its_tokens() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", 8, max_tokens=40, n=4)
    steps = [rig.step() for _ in range(20)]
    finishes = [finish for step in steps for finish in step.finishes]
    assert {finish.status for finish in finishes} == {RequestStatus.FINISHED_LENGTH_CAPPED}
    assert sorted(finish.sequence for finish in finishes) == [0, 1, 2, 3]
    tokens = Counter(name for step in steps for name in step.emitted)
    assert set(tokens) == {"a/0", "a/1", "a/2", "a/3"}
    assert max(tokens.values()) > 8, "those that are left go on with the blocks of those that ended"


def test_a_request_that_outgrows_the_pool_alone_ends_with_the_tokens_it_has() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", 24, max_tokens=30)
    rig.add("b", 4, max_tokens=1)
    rig.step()
    step = rig.step()
    assert step.finished["a"] == "length"
    [finish] = [finish for finish in step.finishes if finish.request_id == "a"]
    assert finish.message is not None
    assert "6 KV blocks" in finish.message
    assert step.emitted == {"b": [7]}  # the blocks serve the next in the same step
    assert rig.free == 6


# Swap


def test_auto_swaps_only_while_several_sequences_are_unfinished() -> None:
    for n, swaps in ((1, False), (2, True)):
        rig = Rig(num_blocks=6, num_host_blocks=8)
        rig.add("a", 8)
        rig.add("b", 7, n=n)
        rig.step()
        while not rig.waiting and not rig.swapped:
            rig.step()
        assert bool(rig.swapped) is swaps


def test_auto_recomputes_one_remaining_sequence() -> None:
    rig = Rig(num_blocks=6, num_host_blocks=8)
    rig.add("a", 8)
    rig.add("b", 7, n=3)
    rig.step()
    for sequence in (0, 2):
        rig.finish("b", sequence)
    while not rig.waiting and not rig.swapped:
        rig.step()
    assert rig.waiting == ["b"]


def test_swap_moves_each_block_once_in_table_order() -> None:
    rig = Rig(num_blocks=7, num_host_blocks=8)
    rig.add("a", 8)
    rig.add("b", 8, n=2)
    rig.step()
    rig.step()
    assert rig.free == 0
    assert rig.blocks("b") == [4]
    step = rig.step()
    while not rig.swapped:
        step = rig.step()
    pairs = step.output.swap_out.tolist()
    assert len(pairs) == len({source for source, _ in pairs}) == 4
    assert [target for _, target in pairs] == sorted(target for _, target in pairs)
    assert rig.scheduler.make_stats().num_free_host_blocks == 4
    assert rig.blocks("b") == [0]


def test_without_free_host_blocks_a_swap_becomes_a_recompute() -> None:
    rig = Rig(num_blocks=5, num_host_blocks=1, preemption_mode=SWAP)
    rig.add("a", 8, max_tokens=6)
    rig.add("b", 7, max_tokens=6)
    rig.step()
    while not rig.waiting:
        rig.step()
    assert rig.swapped == []
    assert rig.waiting == ["b"]
    assert rig.run()["b"][-1] == 7


def test_a_request_is_swapped_in_and_decodes_in_the_same_step() -> None:
    rig = swapped_out()
    while "b" not in (step := rig.step()).kinds:
        pass
    assert step.kinds["b"] is AdmitKind.SWAPPED_IN
    assert step.scheduled["b"] == 1
    assert len(step.output.swap_in) == 2
    assert rig.blocks("b") == [3]


def test_swapped_outrank_waiting() -> None:
    rig = swapped_out()
    rig.add("c", 1)
    assert rig.free >= 1
    assert rig.step().scheduled == {"a": 1}
    assert rig.swapped == ["b"]
    assert rig.waiting == ["c"]


def test_the_adapter_limit_applies_to_swapped_requests() -> None:
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=SWAP, max_loras=1)
    rig.add("a", 8, max_tokens=3)
    rig.add("b", 7, max_tokens=6, lora=LoraRef("x"))
    while not rig.swapped:
        rig.step()
    rig.add("c", 1, max_tokens=20, lora=LoraRef("y"))
    while rig.swapped:
        step = rig.step()
        loras = {"b": "x", "c": "y"}
        assert len({loras[name] for name in step.scheduled if name in loras}) <= 1


def test_abort_while_swapped_frees_the_host() -> None:
    rig = swapped_out()
    assert rig.scheduler.make_stats().num_free_host_blocks == 6
    rig.abort("b")
    assert rig.scheduler.make_stats().num_free_host_blocks == 8
    assert rig.swapped == []


def test_the_output_is_the_same_after_a_swap() -> None:
    rig = swapped_out()
    said = rig.run()
    assert len(said["b"]) + 2 == 6


# Priority


def test_smaller_number_then_arrival_then_the_order_of_adding() -> None:
    rig = Rig(scheduling_policy=PRIORITY, max_num_seqs=1)
    facts = {"a": (5, 1.0), "b": (0, 3.0), "c": (0, 2.0), "z": (-1, 9.0), "b10": (0, 2.0), "b9": (0, 2.0)}
    for name, (priority, arrival) in facts.items():
        rig.add(name, 4, max_tokens=1, priority=priority, arrival_time_s=arrival)
    assert [next(iter(rig.step().scheduled)) for _ in range(6)] == ["z", "c", "b10", "b9", "b", "a"]


def test_the_least_urgent_is_preempted_and_its_blocks_are_freed() -> None:
    rig = Rig(num_blocks=7, max_num_batched_tokens=13, scheduling_policy=PRIORITY, admit_whole_prompt=False)
    rig.add("low", 13, max_tokens=6, priority=9)
    rig.step()
    rig.add("top", 8, max_tokens=4, priority=1)
    rig.add("mid", 16, max_tokens=4, priority=5)
    assert rig.step().scheduled == {"low": 1, "top": 8, "mid": 4}
    step = rig.step()
    assert step.scheduled == {"top": 1, "mid": 12}
    assert step.preempted == ("low",)


def test_a_row_that_preempts_itself_does_not_delay_a_more_urgent_one() -> None:
    rig = Rig(num_blocks=4, scheduling_policy=PRIORITY)
    rig.add("worst", 8, priority=9)
    rig.add("best", 7, priority=1)
    rig.step()
    step = rig.step()
    assert step.preempted == ("worst",)
    assert step.scheduled == {"best": 1}


def test_urgent_requests_preempt_only_with_evict_for_priority() -> None:
    for evict, running in ((False, ["slow"]), (True, ["fast"])):
        rig = Rig(scheduling_policy=PRIORITY, max_num_seqs=1, evict_for_priority=evict)
        rig.add("slow", 8, priority=9)
        rig.step()
        rig.add("fast", 8, priority=0)
        rig.step()
        rig.step()
        assert rig.running == running


def test_nobody_is_preempted_for_an_urgent_request_that_would_not_fit_all_the_same() -> None:
    for num_tokens, preempted in ((21, ()), (20, ("slow",))):
        rig = Rig(num_blocks=8, scheduling_policy=PRIORITY, evict_for_priority=True)
        rig.add("fast", 10, priority=1)
        rig.add("slow", 6, priority=9)
        rig.step()
        rig.add("head", num_tokens, priority=5)
        step = rig.step()
        assert step.preempted == preempted, "three of eight blocks are those of fast"
        assert "head" in (rig.running if preempted else rig.waiting)


def test_sequences_of_more_urgent_requests_count_before_anybody_is_preempted() -> None:
    for num_seqs, preempted in ((3, ()), (2, ("slow",))):
        rig = Rig(max_num_seqs=4, scheduling_policy=PRIORITY, evict_for_priority=True)
        rig.add("fast", 4, n=2, priority=1)
        rig.add("slow", 4, priority=9)
        rig.step()
        rig.add("head", 4, n=num_seqs, priority=5)
        assert rig.step().preempted == preempted


def test_a_victim_is_requeued_by_its_urgency() -> None:
    rig = Rig(num_blocks=6, scheduling_policy=PRIORITY)
    rig.add("a", 8, max_tokens=9, priority=1)
    rig.add("z", 8, max_tokens=6, priority=9)
    rig.step()
    rig.step()
    rig.add("m", 16, priority=5)
    while "z" in rig.running:
        rig.step()
    assert rig.waiting == ["m", "z"]
