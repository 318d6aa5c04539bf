"""Sequences, prefix caching, windows, cross-attention and images, with small numbers."""

from typing import Any

import numpy as np
import pytest

from pagoda.base.config import PreemptionMode
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec, KVShape
from pagoda.core.request import LoraRef, MediaItem
from pagoda.core.rules import MORE_ROOM
from tests.core.rig import Rig

FULL = KVGroupSpec()
CROSS = KVGroupSpec(KVGroupKind.CROSS, layers=(1,))


def window(size: int, layer: int = 0) -> KVGroupSpec:
    return KVGroupSpec(KVGroupKind.WINDOW, window=size, layers=(layer,))


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# Sequences


def test_one_prefill_then_a_fork_that_takes_no_block() -> None:
    rig = Rig()
    rig.add("a", 7, n=4)
    step = rig.step()
    assert step.scheduled == {"a/0": 7}
    assert [fork.sequence for fork in step.output.forks] == [1, 2, 3]
    assert step.emitted == {f"a/{sequence}": [7] for sequence in range(4)}
    assert rig.free == 14


def test_the_first_writer_copies_and_the_last_writes_in_place() -> None:
    rig = Rig()
    rig.add("a", 3, n=2)
    rig.step()
    step = rig.step()
    [(source, target)] = step.output.copies.tolist()
    assert source != target
    assert rig.free == 14
    assert len(rig.step().output.copies) == 0


def test_whole_blocks_need_no_copy() -> None:
    rig = Rig()
    rig.add("a", 8, n=2)
    rig.step()
    step = rig.step()
    assert len(step.output.copies) == 0
    assert rig.free == 12


def test_a_swapped_in_request_may_copy_on_write_too() -> None:
    """Parked right after the fork, both sequences come back on one partly filled block: one of them copies it."""
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
    rig.add("a", 16, max_tokens=3)
    rig.add("b", 3, n=2, max_tokens=3)
    rig.step()
    step = rig.step()
    assert step.preempted == ("b",)
    assert len(step.output.swap_out) == 1
    while not (step := rig.step()).kinds:
        pass
    assert len(step.output.swap_in) == len(step.output.copies) == 1
    assert step.output.swap_in[0, 1] == step.output.copies[0, 0]


def test_siblings_come_back_if_all_but_the_last_can_copy_their_shared_tail() -> None:
    rig = Rig(num_blocks=3, num_host_blocks=2)
    rig.add("a", 2)
    rig.add("b", 7, max_tokens=2, n=2)
    assert rig.step().samples == ["a", "b/0", "b/1"]
    rig.step()
    assert rig.swapped == ["b"]
    rig.abort("a")
    step = rig.step()
    assert (step.finished, len(step.output.copies)) == ({"b/0": "length", "b/1": "length"}, 1)
    assert (rig.free, rig.scheduler.make_stats().num_free_host_blocks) == (3, 2)


def test_the_last_sequence_on_a_shared_tail_needs_no_block() -> None:
    """Two free blocks serve three sequences on one shared tail: the last writes in place."""
    rig = Rig(num_blocks=3)
    rig.add("a", 3, n=3, max_tokens=2)
    rig.step()
    step = rig.step()
    assert len(step.output.copies) == 2
    assert step.preempted == ()


def test_a_finished_sibling_frees_only_its_own_blocks() -> None:
    rig = Rig()
    rig.add("a", 9, n=3, max_tokens=9)
    rig.step()
    rig.step()
    assert rig.free == 16 - 5
    rig.finish("a", 1)
    assert rig.free == 16 - 4
    assert rig.scheduler.has_unfinished_requests()
    texts = rig.run()
    assert set(texts) == {"a/0", "a/2"}
    assert rig.free == 16


def test_n_outputs_take_one_prefill_and_have_the_same_text() -> None:
    rig = Rig(enable_prefix_caching=True)
    rig.add("a", 13, n=3, max_tokens=4)
    assert rig.step().output.total_num_scheduled_tokens == 13
    assert rig.run() == {f"a/{sequence}": [7] * 3 for sequence in range(3)}


def test_unknown_sequences_and_requests_are_ignored() -> None:
    rig = Rig()
    rig.add("a", 4)
    rig.abort("unknown", "a", "a")
    rig.abort("a")
    rig.finish("a", 0)
    assert rig.free == 16


# Prefix caching


def hit_after(first: list[int], second: list[int], *, output: int = 1, **facts: Any) -> int:
    """Tokens of `second` found after `first` was served."""
    rig = Rig(enable_prefix_caching=True, num_blocks=32, max_loras=4)
    rig.add("first", first, max_tokens=output)
    rig.run()
    rig.add("second", second, **facts)
    return rig.step().cached["second"]


def test_only_full_blocks_are_found() -> None:
    assert hit_after(tokens(0, 13), tokens(0, 20)) == 12
    assert hit_after(tokens(0, 13), [*tokens(0, 13), 7, 7, 7, 9], output=4) == 16


def test_a_block_hash_includes_its_parents() -> None:
    assert hit_after(tokens(0, 12), [*tokens(500, 4), *tokens(4, 9)]) == 0


def test_the_first_miss_ends_the_hit() -> None:
    assert hit_after(tokens(0, 16), [*tokens(0, 4), 99, *tokens(5, 15)]) == 4


@pytest.mark.parametrize(("prompt", "cached"), [(16, 12), (17, 16), (4, 0), (3, 0)])
def test_a_full_hit_leaves_one_token_to_compute(prompt: int, cached: int) -> None:
    assert hit_after(tokens(0, 20), tokens(0, prompt)) == cached


def test_two_equal_prompts_in_one_step() -> None:
    rig = Rig(enable_prefix_caching=True)
    rig.add("a", tokens(0, 10))
    rig.add("b", tokens(0, 10))
    step = rig.step()
    assert step.scheduled == {"a": 10, "b": 2}
    assert step.cached == {"a": 0, "b": 8}


def test_computed_chunks_of_a_running_prompt_can_be_hit() -> None:
    rig = Rig(enable_prefix_caching=True, max_num_batched_tokens=20, num_blocks=32)
    rig.add("a", tokens(0, 60))
    rig.step()
    rig.abort("a")
    rig.add("b", [*tokens(0, 22), 99])
    assert rig.step().cached == {"b": 20}


@pytest.mark.parametrize(("output", "cached"), [(6, 8), (7, 12)])
def test_generated_tokens_are_cached_but_the_last(output: int, cached: int) -> None:
    assert hit_after(tokens(0, 6), [*tokens(0, 6), *[7] * output, 99, 98], output=output) == cached


def test_drafts_are_never_cached() -> None:
    rig = Rig(enable_prefix_caching=True)
    rig.add("a", tokens(0, 6))
    rig.step()
    rig.offer({"a": [50, 51, 52]})
    plan = rig.plan()
    assert plan.scheduled == {"a": 4}
    rig.deliver(plan, {"a": [8]})
    rig.add("b", [*tokens(0, 6), 7, 50, 51, 52, 9, 9])
    assert rig.step().cached["b"] == 4
    assert rig.computed("a") == 8


def test_a_hit_on_a_free_block_costs_capacity() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=8)
    rig.add("a", tokens(0, 12), max_tokens=1)
    rig.run()
    assert rig.free == 8
    rig.add("b", tokens(0, 13))
    rig.step()
    assert rig.free == 4


def test_a_failed_admission_leaves_every_count() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=8)
    rig.add("a", tokens(0, 12), max_tokens=1)
    rig.run()
    rig.add("big", tokens(100, 15), max_tokens=9)
    rig.step()
    before = rig.free
    rig.add("b", [*tokens(0, 12), *tokens(900, 8)])
    for _ in range(2):
        assert "b" not in rig.step().scheduled
    assert rig.free >= before - 1


def test_the_oldest_chain_is_evicted_first_from_its_tail() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=8)
    for name, start, count in (("a", 100, 12), ("b", 200, 12), ("c", 300, 13)):
        rig.add(name, tokens(start, count), max_tokens=1)
        rig.run()
    rig.add("a2", tokens(100, 13), max_tokens=1)
    assert rig.step().cached == {"a2": 4}


def test_a_hit_makes_the_chain_the_most_recently_used() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=8)
    for name, start in (("a", 100), ("b", 200), ("a2", 100)):
        rig.add(name, tokens(start, 13), max_tokens=1)
        rig.run()
    rig.add("c", tokens(300, 16), max_tokens=1)
    rig.run()
    rig.add("a3", tokens(100, 13), max_tokens=1)
    assert rig.step().cached == {"a3": 12}


def test_blocks_without_cached_content_are_allocated_first() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=8)
    rig.add("a", tokens(0, 13), max_tokens=1)
    rig.run()
    rig.add("b", tokens(100, 19), max_tokens=1)
    rig.run()
    rig.add("a2", tokens(0, 13), max_tokens=1)
    assert rig.step().cached == {"a2": 12}


def test_a_shared_block_stays_allocated_until_its_last_holder_ends() -> None:
    rig = Rig(enable_prefix_caching=True)
    rig.add("a", tokens(0, 13))
    rig.add("b", tokens(0, 14))
    rig.step()
    assert rig.free == 11
    rig.abort("a")
    assert rig.free == 12
    assert rig.blocks("b") == [4]


def test_duplicates_stay_apart() -> None:
    rig = Rig(enable_prefix_caching=True)
    for name in "ab":
        rig.add(name, tokens(0, 3), max_tokens=9)
    for _ in range(6):
        rig.step()
    assert (rig.blocks("a"), rig.blocks("b")) == ([2], [2])
    assert rig.free == 12


def test_salts() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=32)
    rig.add("a", tokens(0, 12), max_tokens=1, cache_salt="x")
    rig.run()
    for name, salt, cached in (("b", "x", 12), ("c", "y", 0), ("d", None, 0)):
        rig.add(name, tokens(0, 13), max_tokens=1, cache_salt=salt)
        assert rig.step().cached == {name: cached}


def test_adapters_by_name_and_path() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=32)
    rig.add("a", tokens(0, 12), max_tokens=1, lora=LoraRef("x", "/one"))
    rig.run()
    for name, lora, cached in (("b", LoraRef("x", "/one"), 12), ("c", LoraRef("x", "/two"), 0), ("d", None, 0)):
        rig.add(name, tokens(0, 13), max_tokens=1, lora=lora)
        assert rig.step().cached == {name: cached}


def test_images_key_the_blocks_they_touch_and_those_after() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=40, encoder_budget=32, encoder_cache_tokens=64)
    rig.add("a", tokens(0, 16), max_tokens=1, media=(MediaItem("h", 5, 4),))
    rig.run()
    for name, item, cached in (("b", ("h", 5), 16), ("c", ("g", 5), 4), ("d", ("h", 6), 4)):
        rig.add(name, tokens(0, 17), max_tokens=1, media=(MediaItem(*item, 4),))
        assert rig.step().cached == {name: cached}


@pytest.mark.parametrize("how", [{"skip_prefix_read": True}, {"prompt_logprobs": 1}])
def test_a_request_that_does_not_read_the_cache_still_fills_it(how: dict[str, object]) -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=32)
    rig.add("a", tokens(0, 12), max_tokens=1)
    rig.run()
    looked_up = rig.scheduler.make_stats().prefix_queries
    rig.add("b", tokens(0, 17), max_tokens=1, **how)
    assert rig.step().cached == {"b": 0}
    assert rig.scheduler.make_stats().prefix_queries == looked_up, "it was not looked up"
    rig.add("c", tokens(0, 18), max_tokens=1)
    assert rig.step().cached == {"c": 16}


def test_reset() -> None:
    rig = Rig(enable_prefix_caching=True)
    rig.add("a", tokens(0, 8))
    rig.add("b", tokens(100, 7))
    rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    assert rig.scheduler.reset_prefix_cache(preempt_running=True)
    assert rig.waiting == ["a", "b"]
    step = rig.step()
    assert step.cached == {"a": 0, "b": 0}
    rig.run()
    assert rig.scheduler.reset_prefix_cache()
    rig.add("c", tokens(0, 8))
    assert rig.step().cached == {"c": 0}


def test_a_request_counts_once_in_the_hit_rate() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=5)
    rig.add("a", tokens(0, 8), max_tokens=4)
    rig.add("b", tokens(100, 7), max_tokens=6)
    rig.run()
    stats = rig.scheduler.make_stats()
    assert stats.prefix_queries == 15
    assert stats.preemptions > 0
    rig = Rig()
    rig.add("a", 8)
    rig.run()
    assert rig.scheduler.make_stats().prefix_queries == 0


# Windows


def test_blocks_outside_the_window_are_freed() -> None:
    rig = Rig(groups=(window(8),))
    rig.add("a", 16, max_tokens=9)
    rig.step()
    held = [rig.step() and rig.blocks("a")[0] for _ in range(4)]
    assert held == [3, 3, 3, 2]  # computed after the step: 17, 18, 19, 20; blocks go at 16 (two) and at 19 (a third)


def test_the_whole_prompt_check_counts_the_blocks_that_a_window_holds_after_a_long_hit() -> None:
    """Most entries of the hit are out of the window: the rest of the prompt still needs what a window holds."""
    rig = Rig(groups=(window(8),), enable_prefix_caching=True, num_blocks=10, max_num_batched_tokens=8)
    for name in ("x", "y"):
        rig.add(name, 5, max_tokens=40)
    rig.step()
    rig.step()
    head = list(range(100, 140))
    rig.add("a", head, max_tokens=1)
    while "a" in rig.running + rig.waiting:
        rig.step()
    assert rig.free == 5
    rig.add("b", [*head, *range(200, 224)])  # 40 tokens are cached; the decodes take one of the five blocks it may hold
    assert "b" not in rig.step().scheduled


def test_window_blocks_are_freed_by_computed_positions() -> None:
    rig = Rig(groups=(window(8),), max_num_batched_tokens=8, pipeline_depth=2, async_scheduling=True)
    rig.add("a", 24)
    first = rig.plan()
    rig.plan()
    assert rig.blocks("a") == [4]
    rig.deliver(first)
    rig.plan()
    assert rig.blocks("a") == [6]  # 8 tokens are processed: all of them are in the window of 8


def test_a_window_hit_needs_a_run_at_its_end() -> None:
    rig = Rig(groups=(window(8),), enable_prefix_caching=True)
    rig.add("a", tokens(0, 18), max_tokens=9)
    rig.run()
    rig.add("b", [*tokens(0, 18), 7, 7, 7, 99])
    assert rig.step().cached == {"b": 20}
    assert rig.blocks("b") == [3]


def test_mixed_groups_agree_on_a_length() -> None:
    rig = Rig(groups=(FULL, window(8, 1)), enable_prefix_caching=True, num_blocks=32)
    rig.add("a", tokens(0, 18), max_tokens=1)
    rig.run()
    before = rig.free
    rig.add("b", [*tokens(0, 18), 99])
    assert rig.step().cached == {"b": 16}
    assert rig.blocks("b") == [5, 3]
    assert before - rig.free == 8


STATE = KVGroupSpec(KVGroupKind.STATE, window=STATE_WINDOW, layers=(1,))


def test_a_state_is_left_in_its_block_and_goes_on_in_the_next() -> None:
    rig = Rig(groups=(STATE,))
    rig.add("a", 3, max_tokens=9)
    held = [rig.step() and rig.blocks("a")[0] for _ in range(7)]
    assert held == [1, 1, 2, 2, 2, 2, 2]  # computed after the step: 3 to 9; the last full block of 4 stays


def test_a_state_that_is_partly_filled_is_copied_at_a_fork() -> None:
    rig = Rig(groups=(STATE,))
    for name, num_tokens, num_copies in (("a", 6, 1), ("b", 8, 0)):
        rig.add(name, num_tokens, max_tokens=2, n=2)
        rig.step()
        assert len(rig.step().output.copies) == num_copies
        rig.run()


LARGE_STATE = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, layers=(1,), shape=KVShape(1, 1024, 0))


def test_sequences_that_cannot_have_a_state_each_are_refused_by_name() -> None:
    """They would end with one token: memory allows three states, as many as one long sequence needs."""
    rig = Rig(groups=(FULL, LARGE_STATE), num_blocks=64, max_num_seqs=4, max_num_batched_tokens=4)
    rig.add("a", 6, n=4)
    rig.add("b", 3, n=3, max_tokens=2)
    first = rig.step()
    message = "request a needs 4 blocks of recurrent states of the 3 there are"
    assert [finish.message for finish in first.finishes] == [f"{message}; {MORE_ROOM}"] * 4
    assert first.emitted == rig.run() == {"b/0": [7], "b/1": [7], "b/2": [7]}


@pytest.mark.parametrize(
    ("groups", "num_blocks", "there"),
    [
        ((FULL, LARGE_STATE), 64, "64 KV blocks and 3 blocks of recurrent states"),
        ((LARGE_STATE,), 3, "3 blocks of recurrent states"),
    ],
    ids=str,
)
def test_a_sequence_that_the_pools_cannot_hold_says_how_large_they_are(
    groups: tuple[KVGroupSpec, ...], num_blocks: int, there: str
) -> None:
    rig = Rig(groups=groups, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=4)
    rig.add("a", 8, n=3, max_tokens=2)
    finishes = [finish for _ in range(4) for finish in rig.step().finishes]
    message = f"the KV cache has {there}: too few for this request to continue; {MORE_ROOM}"
    assert message in [finish.message for finish in finishes]


@pytest.mark.parametrize(
    ("groups", "num_blocks", "fit"),
    [
        ((FULL,), 64, 6),
        ((window(6),), 64, 19),
        ((FULL, KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, layers=(1,), shape=KVShape(1, 16, 0))), 90, 9),
        ((KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, shape=KVShape(1, 4096, 0)),), 40, 12),
    ],
    ids=str,
)
def test_as_many_requests_run_at_once_as_fit(groups: tuple[KVGroupSpec, ...], num_blocks: int, fit: int) -> None:
    """While they compute their prompts, share what is in flight, and decode up to their last token."""
    rig = Rig(groups=groups, num_blocks=num_blocks, max_num_seqs=32, max_num_batched_tokens=32)
    assert rig.scheduler._state.kv.sizing.num_requests(num_blocks, 40) == fit
    for number in range(fit):
        rig.add(f"{number}", 16, max_tokens=24)
    steps = [rig.step() for _ in range(36)]
    assert not any(step.preempted for step in steps)
    assert max(len(step.owners) for step in steps) == fit


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE), (STATE,)], ids=str)
def test_a_growing_conversation_finds_as_much_with_states(groups: tuple[KVGroupSpec, ...]) -> None:
    """Each turn adds five tokens and gets three; the share that is found is that of attention alone."""
    rig, conversation, found = Rig(groups=groups, enable_prefix_caching=True, num_blocks=64), tokens(0, 6), list[int]()
    for turn in range(6):
        rig.add(f"turn {turn}", conversation, max_tokens=3)
        found.append(rig.step().cached[f"turn {turn}"])
        [answer] = rig.run().values()
        conversation = [*conversation, *([7] * 3), *tokens(100 * turn, 5)]
        assert len(answer) == 2
    assert found == [0, 8, 16, 24, 32, 40]


def test_a_hit_goes_back_to_the_last_state_that_is_left() -> None:
    """Where prompts part within a block, and where the pool has taken the last snapshot for another request."""
    rig = Rig(groups=(FULL, STATE), enable_prefix_caching=True, num_blocks=64)
    rig.add("a", tokens(0, 18), max_tokens=1)
    rig.run()
    rig.add("b", [*tokens(0, 14), 99, 98, 97, 96, 95], max_tokens=1)
    assert rig.step().cached == {"b": 12}
    rig.run()
    cache = rig.scheduler._state.kv.prefix_cache
    hashes = list(cache._blocks[1])
    cache.uncache_blocks(np.array([cache._blocks[1][hashes[2]]], np.int32))
    rig.add("c", [*tokens(0, 14), 1], max_tokens=1)
    assert rig.step().cached == {"c": 8}


RARE_STATE = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, layers=(1,), shape=KVShape(1, 4096, 0))  # every 16 tokens


def rare_states(max_num_batched_tokens: int = 64) -> Rig:
    return Rig(
        groups=(FULL, RARE_STATE),
        enable_prefix_caching=True,
        num_blocks=256,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def test_a_chunk_leaves_states_every_few_blocks_before_its_last_token_and_at_its_end() -> None:
    rig, tables = rare_states(max_num_batched_tokens=27), list[list[int]]()
    rig.add("a", 50, max_tokens=20)
    for _ in range(11):
        rig.step()
        tables.append(np.flatnonzero(rig.scheduler._state.kv.tables.of(0)[1]).tolist())
    assert tables[:3] == [[3, 6], [6, 7, 11, 12], [11, 12]]  # those that are passed are free, and found
    assert tables[-1] == [13, 14]


def test_the_same_prompt_and_a_longer_one_go_on_from_its_end() -> None:
    rig = rare_states()
    rig.add("a", tokens(0, 43), max_tokens=1)
    rig.run()
    rig.add("again", tokens(0, 43), max_tokens=1)
    assert rig.step().cached == {"again": 40}
    rig.add("longer", tokens(0, 60), max_tokens=1)
    assert rig.step().cached == {"longer": 40}


def test_a_sequence_leaves_the_state_of_its_last_full_block() -> None:
    rig = rare_states()
    rig.add("a", tokens(0, 18), max_tokens=13)
    rig.run()
    rig.add("next turn", [*tokens(0, 18), *([7] * 13), 1, 2, 3], max_tokens=1)
    assert rig.step().cached == {"next turn": 28}  # 30 were computed


def test_a_prompt_leaves_a_state_where_it_parts_from_another() -> None:
    rig, found = rare_states(), list[int]()
    for number in range(3):
        rig.add(f"{number}", [*tokens(0, 29), *tokens(100 * (number + 1), 9)], max_tokens=1)
        found.append(rig.step().cached[f"{number}"])
        rig.run()
    assert found == [0, 16, 28]


def test_without_attention_it_is_not_known_where_prompts_part() -> None:
    rig, found = Rig(groups=(RARE_STATE,), enable_prefix_caching=True, num_blocks=64), list[int]()
    for number in range(3):
        rig.add(f"{number}", [*tokens(0, 29), *tokens(100 * (number + 1), 9)], max_tokens=1)
        found.append(rig.step().cached[f"{number}"])
        rig.run()
    assert found == [0, 16, 16]


def test_states_between_snapshots_take_no_room_in_the_cache() -> None:
    """However long it decodes, and though another request looks for its blocks meanwhile."""
    rig = rare_states()
    rig.add("a", 18, max_tokens=60)
    for number in range(9):
        for _ in range(6):
            rig.step()
        rig.add(f"looks {number}", 2, max_tokens=1)
    rig.run()
    known = rig.scheduler._state.kv.prefix_cache._blocks
    assert (len(known[0]), len(known[1])) == ((18 + 59) // 4, (18 + 59) // 16 + 1)  # and the last full one


def test_a_batch_hashes_nothing_while_a_request_waits_for_a_sequence_and_all_once_it_looks() -> None:
    rig = Rig(enable_prefix_caching=True, num_blocks=32, max_num_seqs=2)
    rig.add("a", 8, max_tokens=20)
    rig.add("b", 8, max_tokens=20)
    rig.step()
    cache, table = rig.scheduler._state.kv.prefix_cache, rig.scheduler._state.table
    for _ in range(8):
        rig.add("waits", 8)
        rig.step()
        rig.abort("waits")
    assert cache.num_cached[:2].tolist() == [2, 2]
    computed = table.token_ids[0, : table.num_tokens[0]].tolist()
    rig.abort("b")
    rig.add("c", [*computed, 1], max_tokens=1)
    assert rig.step().cached["c"] == 16
    assert cache.num_cached[0] == 4


def test_the_null_block_is_never_counted() -> None:
    rig = Rig(groups=(window(4),), num_blocks=3)
    rig.add("a", 4, max_tokens=40)
    rig.step()
    for _ in range(30):
        rig.step()
        assert rig.free + rig.blocks("a")[0] == 3
    stats = rig.scheduler.make_stats()
    assert stats.kv_usage == pytest.approx(rig.blocks("a")[0] / 3)


# Encoder-decoder


def encoder_decoder(num_blocks: int, **config: Any) -> Rig:
    sizes: dict[str, Any] = {"encoder_budget": 64, "encoder_cache_tokens": 64}
    return Rig(num_blocks=num_blocks, groups=(FULL, CROSS), encoder_decoder=True, **sizes, **config)


def test_self_and_cross_blocks_come_from_one_pool() -> None:
    rig = encoder_decoder(9)
    for name in "abc":
        rig.add(name, 3, max_tokens=2, encoder_len=12, media=(MediaItem(name, 0, 12),))
    assert list(rig.step().scheduled) == ["a", "b"]
    assert rig.free == 1


def test_the_cross_table_does_not_grow() -> None:
    rig = encoder_decoder(16)
    rig.add("a", 3, encoder_len=9, media=(MediaItem("h", 0, 9),))
    rig.step()
    for _ in range(5):
        rig.step()
    assert rig.blocks("a") == [2, 3]
    rig.abort("a")
    assert rig.free == 16


def test_only_decoder_tokens_count() -> None:
    rig = encoder_decoder(32)
    for name in "abcd":
        rig.add(name, 4, encoder_len=4, media=(MediaItem(name, 0, 4),))
    assert rig.step().output.total_num_scheduled_tokens == 16


def test_swap_moves_the_cross_table_too() -> None:
    rig = encoder_decoder(8, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP)
    for name in "ab":
        rig.add(name, 4, max_tokens=9, encoder_len=8, media=(MediaItem(name, 0, 8),))
    rig.step()
    step = rig.step()
    while not rig.swapped:
        step = rig.step()
    assert len(step.output.swap_out) == 4
    assert len(rig.run()["b"]) + 5 == 9


# Images


def pictures(**config: object) -> Rig:
    return Rig(**{"num_blocks": 32, "encoder_budget": 8, "encoder_cache_tokens": 32, **config})


def test_a_chunk_ends_before_an_image_that_has_no_budget() -> None:
    rig = pictures()
    for name in "abc":
        rig.add(name, 14, media=(MediaItem(name, 3, 6),))
    assert rig.step().scheduled == {"a": 14, "b": 3, "c": 3}
    assert rig.step().scheduled == {"a": 1, "b": 11}
    assert rig.step().scheduled == {"a": 1, "b": 1, "c": 11}


def test_a_hit_that_reaches_into_an_image_waits_for_it() -> None:
    rig = pictures(enable_prefix_caching=True, encoder_cache_tokens=8)
    rig.add("a", tokens(0, 20), max_tokens=1, media=(MediaItem("h", 6, 8),))
    rig.run()
    rig.add("b", tokens(100, 20), max_tokens=1, media=(MediaItem("g", 0, 8),))
    rig.add("c", [*tokens(0, 11), *tokens(500, 9)], media=(MediaItem("h", 6, 8),))
    step = rig.step()
    assert list(step.scheduled) == ["b"]
    assert rig.step().cached == {"c": 8}


def test_outputs_stay_until_room_is_needed_oldest_first() -> None:
    rig = pictures(encoder_cache_tokens=10)
    ran, evicted = [], []
    for number, item in enumerate(("x", "y", "x", "z", "x", "y")):
        rig.add(f"r{number}", 10, max_tokens=1, media=(MediaItem(item, 2, 4),))
        step = rig.step()
        ran.append([run.content_hash for run in step.output.encoder_runs])
        evicted += step.output.encoder_freed
    assert ran == [["x"], ["y"], [], ["z"], [], ["y"]]
    assert evicted == ["y", "z"]


def test_whole_images_only() -> None:
    for whole, chunks in ((True, [6, 10, 8]), (False, [10, 10, 4])):
        rig = pictures(max_num_batched_tokens=10, no_partial_media=whole)
        rig.add("a", 24, media=(MediaItem("h", 6, 8),))
        assert [rig.step().scheduled["a"] for _ in range(3)] == chunks


def test_a_repeated_image_is_held_to_its_last_place() -> None:
    rig = pictures(encoder_cache_tokens=8, max_num_batched_tokens=16)
    rig.add("a", 40, media=(MediaItem("h", 2, 8), MediaItem("h", 30, 8)))
    rig.step()
    rig.add("b", 10, media=(MediaItem("g", 0, 8),))
    assert list(rig.step().scheduled) == ["a"]
    rig.step()
    assert "b" in rig.step().scheduled


def test_sequences_that_come_back_need_no_more_of_a_window_than_they_hold() -> None:
    rig = Rig(groups=(window(8),), num_blocks=10, max_num_seqs=4, max_num_batched_tokens=4)
    rig.add("a", 4, max_tokens=40, n=2)
    while not rig.computed("a") >= 32:
        rig.step()
    rig.scheduler.reset_prefix_cache(preempt_running=True)
    assert {len(rest) for rest in rig.run().values()} == {40 - 29}
