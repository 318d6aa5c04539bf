"""Queues, admission and the budget of a step, with small numbers."""

from dataclasses import replace

import pytest

from pagoda.base.config import PreemptionMode, SchedulingMode, SchedulingPolicy
from pagoda.base.errors import ConfigError, RequestError
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import LoraRef
from tests.core.rig import FILL, Rig


def test_arrival_order() -> None:
    rig = Rig()
    for count, name in enumerate("abc", 1):
        rig.add(name, 4)
        assert rig.scheduler.get_request_counts() == (0, count)
    assert rig.waiting == ["a", "b", "c"]


def test_a_handle_in_use_is_refused_and_can_be_used_again_after_its_end() -> None:
    """Its id is a label: another request may have the same."""
    rig = Rig()
    first = rig.add("a", 4, max_tokens=1)
    again = replace(first, request_id="again")
    with pytest.raises(RequestError, match="client 0 has a request with handle 1"):
        rig.scheduler.add_request(again)
    assert rig.step().scheduled == {"a": 4}
    rig.scheduler.add_request(again)
    rig.scheduler.add_request(replace(again, client_index=1))
    assert rig.waiting == ["again", "again"]


def test_no_request_overtakes_the_head_of_the_queue() -> None:
    rig = Rig(num_blocks=8)
    rig.add("a", 20)
    rig.step()
    rig.add("b", 24)
    rig.add("c", 4)
    assert rig.free == 3
    assert list(rig.step().scheduled) == ["a"]
    assert rig.waiting == ["b", "c"]


def test_without_chunks_admission_stops_at_the_first_request_that_does_not_fit() -> None:
    rig = Rig(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16)
    for name, tokens in (("a", 8), ("b", 12), ("c", 2)):
        rig.add(name, tokens)
    assert rig.step().scheduled == {"a": 8}


def test_a_skipped_request_keeps_its_place() -> None:
    rig = Rig(max_loras=1)
    rig.add("a", 4, lora=LoraRef("x"))
    rig.add("b", 4, lora=LoraRef("y"))
    rig.add("c", 4, lora=LoraRef("x"))
    assert set(rig.step().scheduled) == {"a", "c"}
    rig.add("d", 4, lora=LoraRef("y"))
    assert rig.waiting == ["b", "d"]


def test_a_prompt_longer_than_the_model_is_refused_on_arrival() -> None:
    rig = Rig(max_model_len=32)
    with pytest.raises(RequestError, match="max_model_len is 32"):
        rig.add("a", 48)
    with pytest.raises(RequestError, match="max_model_len is 32"):
        rig.add("a", 32)
    rig.add("a", 31)
    assert rig.step().scheduled == {"a": 31}


def test_a_prompt_as_long_as_the_model_is_served_if_it_is_only_scored() -> None:
    for facts in ({}, {"async_scheduling": True, "pipeline_depth": 2}, {"has_followers": True}):
        rig = Rig(max_model_len=32, max_num_batched_tokens=31, **facts)
        with pytest.raises(RequestError, match="max_model_len is 32"):
            rig.add("a", 33, max_tokens=0)
        rig.add("a", 32, max_tokens=0, n=2, eos_token_ids=(FILL,))
        assert rig.step().scheduled == {"a/0": 31}
        last = rig.step()
        assert last.scheduled == {"a/0": 1}
        assert last.finished == {"a/0": "length", "a/1": "length"}
        assert rig.free == 16


def test_a_phased_engine_ignores_what_can_never_run_whole() -> None:
    rig = Rig(scheduling_mode=SchedulingMode.PHASED, max_num_batched_tokens=32)
    rig.add("a", 48)
    rig.add("b", 4)
    step = rig.step()
    assert step.scheduled == {"b": 4}
    assert step.finished["a"] == "length"


def test_what_never_fits_is_ignored_with_a_message_and_delays_no_request() -> None:
    rig = Rig(num_blocks=5)
    rig.add("a", 24)
    rig.add("b", 4)
    step = rig.step()
    assert step.scheduled == {"b": 4}
    [finish] = [finish for finish in step.finishes if finish.request_id == "a"]
    assert finish.message is not None
    assert "6 KV blocks" in finish.message
    assert rig.waiting == []


@pytest.mark.parametrize(("pool", "share", "kept"), [(50, 0.01, 0), (100, 0.01, 1), (16, 0.25, 4)])
def test_watermark_is_a_share_of_the_pool(pool: int, share: float, kept: int) -> None:
    for blocks, enters in ((pool - 1 - kept, True), (pool - kept, False)):
        rig = Rig(num_blocks=pool, watermark=share, max_model_len=1000, max_num_batched_tokens=1000)
        rig.add("a", 3)
        rig.step()
        rig.add("b", 4 * blocks)
        assert ("b" in rig.step().scheduled) is enters


def test_one_big_request_may_use_the_whole_pool_alone() -> None:
    rig = Rig(num_blocks=100, watermark=0.01, max_model_len=1000, max_num_batched_tokens=1000)
    rig.add("a", 400, max_tokens=1)
    assert rig.step().scheduled == {"a": 400}


def test_the_fourth_one_block_prompt_waits() -> None:
    rig = Rig(num_blocks=4, watermark=0.25)
    for name in "abcd":
        rig.add(name, 3)
    assert list(rig.step().scheduled) == ["a", "b", "c"]


def test_the_watermark_applies_to_admissions_while_others_run() -> None:
    rig = Rig(num_blocks=15, watermark=0.25)
    rig.add("a", 52)
    assert rig.step().scheduled == {"a": 52}
    rig.add("b", 4)
    assert rig.step().scheduled == {"a": 1}
    assert rig.free == 1


def test_whole_prompt_gate() -> None:
    for gate, entered in ((True, {"a"}), (False, {"a", "b"})):
        rig = Rig(num_blocks=8, max_num_batched_tokens=16, admit_whole_prompt=gate)
        rig.add("a", 12)
        rig.add("b", 24)
        assert set(rig.step().scheduled) == entered


def test_the_gate_checks_blocks_and_reserves_none() -> None:
    rig = Rig(num_blocks=8, max_num_batched_tokens=8)
    rig.add("a", 20)
    rig.step()
    assert rig.free == 6


def test_sequences_count_from_the_prefill_on() -> None:
    rig = Rig(max_num_seqs=5)
    rig.add("a", 4, n=4)
    rig.add("b", 4, n=2)
    rig.add("c", 4)
    assert list(rig.step().scheduled) == ["a/0"]
    assert rig.waiting == ["b", "c"]


def test_a_freed_sequence_slot_is_used_by_the_next_schedule() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("a", 4, max_tokens=1)
    rig.add("b", 4)
    rig.add("c", 4)
    rig.step()
    assert list(rig.step().scheduled) == ["b"]
    rig.abort("b")
    assert list(rig.step().scheduled) == ["c"]


def test_a_step_that_preempts_admits_no_request() -> None:
    rig = Rig(num_blocks=5)
    rig.add("a", 8)
    rig.add("b", 7)
    rig.step()
    rig.step()
    rig.add("c", 1)
    step = rig.step()
    assert step.preempted == ("b",)
    assert list(step.scheduled) == ["a"]
    assert rig.free == 2
    assert rig.waiting == ["b", "c"]


def test_an_empty_decision_is_legal() -> None:
    rig = Rig(pipeline_depth=2)
    rig.add("a", 4)
    first = rig.plan()
    second = rig.plan()
    assert second.output.is_empty
    assert rig.scheduler.has_unfinished_requests()
    rig.deliver(first)
    assert rig.plan().scheduled == {"a": 1}


def test_chunks_take_what_is_left() -> None:
    rig = Rig(max_num_batched_tokens=16)
    for name in "abc":
        rig.add(name, 10)
    assert rig.step().scheduled == {"a": 10, "b": 6}
    assert rig.step().scheduled == {"a": 1, "b": 4, "c": 10}


def test_cached_tokens_cost_nothing() -> None:
    rig = Rig(enable_prefix_caching=True, max_num_batched_tokens=8, num_blocks=32)
    rig.add("a", list(range(17)), max_tokens=1)
    rig.run()
    rig.add("b", [*range(16), 99, 98])
    step = rig.step()
    assert step.cached == {"b": 16}
    assert step.output.total_num_scheduled_tokens == 2


def test_a_row_with_nothing_to_compute_is_skipped() -> None:
    rig = Rig(pipeline_depth=2)
    rig.add("a", 4)
    first = rig.plan()
    rig.add("b", 4)
    second = rig.plan()
    assert second.scheduled == {"b": 4}
    rig.deliver(first)
    assert rig.plan().scheduled == {"a": 1}


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        Rig(max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="max_model_len=256"):
        Rig(enable_chunked_prefill=False)


def test_long_prompt_cap() -> None:
    rig = Rig(long_prefill_token_threshold=6, max_num_batched_tokens=16)
    for name in "abc":
        rig.add(name, 14)
    steps = [list(rig.step().scheduled.values()) for _ in range(3)]
    assert steps == [[6, 6, 4], [6, 6, 4], [2, 2, 6]]


def test_the_cap_is_lifted_while_alone() -> None:
    rig = Rig(long_prefill_token_threshold=6, max_num_batched_tokens=16)
    rig.add("a", 40)
    assert rig.step().scheduled == {"a": 16}
    rig.add("b", 4)
    assert rig.step().scheduled == {"a": 6, "b": 4}


def test_prompts_get_at_most_their_share_of_a_step_with_decodes() -> None:
    rig = Rig(prefill_beside_decodes=3, max_num_batched_tokens=16)
    rig.add("a", 4)
    assert rig.step().scheduled == {"a": 4}, "nothing decodes yet: no limit"
    rig.add("b", 9)
    rig.add("c", 9)
    assert rig.step().scheduled == {"a": 1, "b": 3}
    assert rig.step().scheduled == {"a": 1, "b": 3}
    assert rig.step().scheduled == {"a": 1, "b": 3}
    assert rig.step().scheduled == {"a": 1, "b": 1, "c": 3}, "b decodes next to a: c costs neither of them a token"
    rig.abort("a", "b")
    assert rig.step().scheduled == {"c": 6}, "and no decode is left that c could delay"


def test_a_prompt_ahead_in_the_queue_delays_no_decode() -> None:
    rig = Rig(prefill_beside_decodes=3, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    rig.add("long", 30)
    rig.add("b", 2)
    rig.add("c", 2)
    assert rig.step().scheduled == {"long": 6, "b": 2, "c": 2}
    rig.add("late", 4)
    assert rig.step().scheduled == {"long": 3, "b": 1, "c": 1}
    assert rig.step().scheduled == {"long": 3, "b": 1, "c": 1}


def test_a_share_for_prompts_needs_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="prefill_beside_decodes"):
        Rig(prefill_beside_decodes=3, enable_chunked_prefill=False, max_num_batched_tokens=512)


def test_one_partial_prefill_blocks_a_second_one() -> None:
    rig = Rig(max_num_partial_prefills=1, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    rig.add("a", 14)
    rig.add("b", 14)
    assert rig.step().scheduled == {"a": 6}
    assert rig.step().scheduled == {"a": 6}
    assert rig.step().scheduled == {"a": 2, "b": 6}


def test_chunks_are_not_rounded_to_blocks() -> None:
    rig = Rig(block_size=2, max_num_batched_tokens=4, max_num_seqs=4, enable_prefix_caching=True, num_blocks=32)
    rig.add("a", 2)
    rig.step()
    rig.add("b", 9)
    assert rig.step().scheduled == {"a": 1, "b": 3}


@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize("preemption", PreemptionMode)
def test_after_everything_ends_the_pool_is_full(policy: SchedulingPolicy, preemption: PreemptionMode) -> None:
    groups = (KVGroupSpec(), KVGroupSpec(KVGroupKind.WINDOW, window=8, layers=(1,)))
    modes = {"scheduling_policy": policy, "preemption_mode": preemption}
    rig = Rig(num_blocks=14, num_host_blocks=6, groups=groups, max_num_seqs=5, **modes)
    for number, name in enumerate("abcd"):
        rig.add(name, 6 + number, n=1 + number % 2, priority=number % 3)
    rig.run()
    assert rig.free == 14
    assert rig.scheduler.make_stats().num_free_host_blocks == 6


def test_a_request_that_can_never_run_delays_no_other() -> None:
    rig = Rig(scheduling_mode=SchedulingMode.PHASED, max_num_seqs=4, max_num_batched_tokens=8)
    for name in ("a", "b"):
        rig.add(name, 4)
    rig.step()
    rig.add("too long for a step", 12, n=4)
    rig.add("c", 4)
    assert list(rig.plan().cached) == ["c"]
    assert rig.waiting == []
