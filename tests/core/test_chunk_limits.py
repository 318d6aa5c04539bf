"""Chunk limits: what a step gives to prompts next to decodes, to drafts under a cap, and to prompts that stay whole."""

import pytest

from pagoda.base.config import PreemptionMode, SchedulingMode
from pagoda.core import planning
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec
from pagoda.core.request import MediaItem
from pagoda.core.step_plan import Chunk
from tests.core.rig import Rig
from tests.core.test_corner_cases import preempt


@pytest.mark.parametrize("in_row_order", [False, True])
def test_a_small_share_for_prompts_does_not_cut_drafts(in_row_order: bool) -> None:
    """in_row_order: a request with media in the batch has the step planned row by row."""
    rig = Rig(prefill_beside_decodes=2, encoder_budget=8, encoder_cache_tokens=8)
    rig.add("a", 4)
    rig.step()
    if in_row_order:
        rig.add("m", 12, media=(MediaItem("image", 8, 4),))
    rig.offer({"a": [1, 2, 3]})
    step = rig.step({"a": [1, 2, 3, 7]})
    assert step.scheduled["a"] == 4
    rig.offer({"a": [1, 2, 3]})
    assert rig.step({"a": [1, 2, 3, 7]}).scheduled["a"] == 4


def test_a_prompt_has_its_share_next_to_drafts_that_are_computed_again() -> None:
    """With states, the right ones before a wrong one are: they take nothing of what prompts get."""
    rig = Rig(prefill_beside_decodes=2, groups=(KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW),))
    rig.add("a", 4)
    rig.step()
    rig.add("b", 12)
    for _ in range(3):
        rig.offer({"a": [1, 2, 3]})
        scheduled = rig.step({"a": [1, 2, 8]}).scheduled
    assert scheduled == {"a": 3 + 3, "b": 2}


def test_the_cap_for_long_prompts_does_not_cut_drafts() -> None:
    rig = Rig(long_prefill_token_threshold=2)
    rig.add("a", 4)
    rig.add("b", 4)
    while rig.step().samples != ["a", "b"]:
        pass
    rig.offer({"a": [1, 2, 3]})
    assert rig.step({"a": [1, 2, 3, 7]}).scheduled == {"a": 4, "b": 1}


@pytest.mark.parametrize("in_row_order", [False, True])
def test_prompts_admitted_before_decodes_share_the_prompts_limit(in_row_order: bool) -> None:
    rig = Rig(
        max_num_batched_tokens=8,
        long_prefill_token_threshold=3,
        prefill_beside_decodes=3,
        encoder_budget=8,
        encoder_cache_tokens=8,
    )
    rig.add("a", 10, media=(MediaItem("image", 8, 2),) if in_row_order else ())
    rig.add("b", 10)
    rig.add("c", 1)
    rig.add("d", 1)
    assert rig.step().scheduled == {"a": 3, "b": 3, "c": 1, "d": 1}
    assert rig.step().scheduled == {"a": 3, "c": 1, "d": 1}
    assert rig.step().scheduled == {"a": 3, "c": 1, "d": 1}
    assert rig.step().scheduled == {"a": 1, "b": 2, "c": 1, "d": 1}


def test_the_cap_has_no_effect_without_chunked_prefill() -> None:
    rig = Rig(max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False, long_prefill_token_threshold=5)
    rig.add("a", 4)
    rig.add("b", 12)
    assert rig.step().scheduled == {"a": 4, "b": 12}


def test_an_item_at_the_start_of_a_chunk_is_not_split() -> None:
    rig = Rig(max_num_batched_tokens=8, no_partial_media=True, encoder_budget=16, encoder_cache_tokens=16)
    rig.add("a", 4)
    rig.step()
    rig.add("m", 12, media=(MediaItem("image", 0, 8),))
    assert rig.step().scheduled == {"a": 1}  # seven tokens are left, the image has eight
    rig.abort("a")
    assert rig.step().scheduled == {"m": 8}


@pytest.mark.parametrize(
    ("prompt", "offset", "chunks"), [(12, 2, [2, 8, 2]), (18, 0, [8, 3, 3])], ids=["before it", "after it"]
)
def test_a_cap_below_an_item_that_must_stay_whole_yields_to_it(prompt: int, offset: int, chunks: list[int]) -> None:
    """Until the item is computed, and no longer."""
    rig = Rig(
        max_num_batched_tokens=16,
        no_partial_media=True,
        long_prefill_token_threshold=3,
        encoder_budget=16,
        encoder_cache_tokens=16,
    )
    rig.add("a", 4)
    rig.step()
    rig.add("m", prompt, media=(MediaItem("image", offset, 8),))
    assert [rig.step().scheduled["m"] for _ in range(3)] == chunks


def test_a_replayed_request_that_outgrew_a_phased_step_is_served() -> None:
    """Before the engine died it was served, since its prompt fits a step; its output since then must not end it."""
    rig = Rig(scheduling_mode=SchedulingMode.PHASED, max_num_batched_tokens=8, max_num_seqs=4)
    rig.add("a", 6, max_tokens=8, prior_output=((1, 2, 3, 4),))
    assert rig.step().scheduled == {"a": 8}
    assert rig.step().emitted == {"a": [7]}
    assert len(rig.run()["a"]) == 3


def test_a_request_that_is_swapped_in_keeps_to_the_rules_for_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, max_num_batched_tokens=8)
    rig.add("a", 20)
    rig.step()
    preempt(rig, "a")
    with monkeypatch.context() as patch:
        patch.setattr(planning, "fit_chunk", lambda *_: Chunk(0))
        assert rig.step().scheduled == {}
        assert rig.swapped == ["a"]
    assert rig.step().scheduled == {"a": 8}
    assert len(rig.run()["a"]) == 8


def test_siblings_that_resume_together_share_the_prompts_limit() -> None:
    """Each of the three lacks one token; next to the decode of `b`, two tokens are left for rows that enter."""
    rig = Rig(
        num_host_blocks=16,
        preemption_mode=PreemptionMode.SWAP,
        prefill_beside_decodes=2,
        max_num_batched_tokens=16,
        num_blocks=8,
    )
    rig.add("b", 4)
    rig.add("a", 4, n=3)
    rig.step()
    preempt(rig, "a")
    assert rig.step().scheduled == {"b": 1, "a/0": 1, "a/1": 1}
    assert rig.step().scheduled == {"b": 1, "a/0": 1, "a/1": 1, "a/2": 1}


@pytest.mark.parametrize("in_row_order", [False, True])
def test_a_prompt_leaves_a_token_for_every_sequence_of_a_request_with_several(in_row_order: bool) -> None:
    """in_row_order: a request with media in the batch has the step planned row by row."""
    media = (MediaItem("image", 50, 4),) if in_row_order else ()
    settings = {"num_blocks": 40, "encoder_budget": 8, "encoder_cache_tokens": 8}
    rig = Rig(long_prefill_token_threshold=7, max_num_batched_tokens=10, **settings)
    rig.add("long", 60, media=media)
    rig.add("group", 3, n=6)
    assert rig.step().scheduled == {"long": 7, "group/0": 3}
    for _ in range(3):
        assert rig.step().scheduled == {"long": 4, **{f"group/{number}": 1 for number in range(6)}}
