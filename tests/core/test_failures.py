"""Failed steps and rows: what they should have computed is neither found nor used by any other request."""

import numpy as np
import pytest

from pagoda.base.config import PreemptionMode, SchedulingPolicy
from pagoda.base.sampling_params import BeamSearchOptions
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec
from pagoda.core.request import MediaItem, RequestStatus
from pagoda.core.scheduler_output import ModelRunnerOutput
from tests.core.rig import FILL, PlannedStep, Rig

PROMPT = list(range(100, 109))  # two full blocks, and one more token


def overlapping(**config: object) -> Rig:
    settings: dict[str, object] = {"enable_prefix_caching": True, "pipeline_depth": 2, "async_scheduling": True}
    return Rig(**settings | config)  # type: ignore[arg-type]


def fail(rig: Rig, step: PlannedStep, *rows: int) -> dict[str, RequestStatus]:
    """The step raised; or, with `rows`, those fail alone. Return how sequences end that nobody aborts."""
    if rows:
        count = len(step.output.sample_rows)
        failed = dict.fromkeys(rows, "not finite")
        tokens, counts = np.full((count, 1), FILL, np.int32), np.ones(count, np.int32)
        result = ModelRunnerOutput(step.output.step, tokens, counts, failed=failed)
        outputs = rig.scheduler.update_from_output(step.output, result)
    else:
        outputs = rig.scheduler.fail_step(step.output, "the step failed")
    rig.scheduler.check()
    finishes = [finish for of_client in outputs.values() for finish in of_client.ends]
    finishes = [finish for finish in finishes if finish.status is not RequestStatus.FINISHED_ABORTED]
    return {rig._name(finish.request_id, finish.sequence): finish.status for finish in finishes}


def cached_tokens(rig: Rig, prompt: list[int]) -> int:
    """Tokens of `prompt` that a new request finds in the prefix cache."""
    rig.add("probe", prompt, max_tokens=1)
    step = rig.plan()
    rig.abort("probe")
    return step.cached["probe"]


@pytest.mark.parametrize("raised", [True, False], ids=["step", "row"])
def test_blocks_of_a_row_that_left_while_its_step_was_in_flight_are_not_found_after_it_failed(raised: bool) -> None:
    rig = overlapping()
    rig.add("a", PROMPT)
    step = rig.plan()
    rig.abort("a")
    assert fail(rig, step, *([] if raised else step.output.rows.tolist())) == {}
    assert cached_tokens(rig, PROMPT) == 0


def test_the_block_that_the_step_after_eos_should_have_filled_is_not_found_after_it_failed() -> None:
    rig = overlapping()
    rig.add("a", PROMPT[:7], eos_token_ids=(2,))
    first, second = rig.plan(), rig.plan()
    assert rig.deliver(first, {"a": [2]}).finished == {"a": "stop"}  # the second block ends with the eos
    assert fail(rig, second) == {}
    assert cached_tokens(rig, [*PROMPT[:7], 2, 50]) == 4


def test_a_step_that_raises_leaves_the_blocks_of_earlier_steps_in_the_cache() -> None:
    rig = overlapping()
    rig.add("a", PROMPT)
    rig.step()
    assert fail(rig, rig.plan()) == {"a": RequestStatus.FINISHED_ERROR}
    assert cached_tokens(rig, PROMPT) == 8


def test_blocks_of_a_row_that_fails_alone_are_not_found_whichever_step_filled_them() -> None:
    rig = overlapping()
    rig.add("a", PROMPT)
    rig.step()
    step = rig.plan()
    assert fail(rig, step, *step.output.rows.tolist()) == {"a": RequestStatus.FINISHED_ERROR}
    assert cached_tokens(rig, PROMPT) == 0


@pytest.mark.parametrize("raised", [True, False], ids=["step", "row"])
@pytest.mark.parametrize("group", [KVGroupSpec(KVGroupKind.WINDOW, 3), KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW)])
def test_blocks_that_the_window_of_a_row_has_left_are_not_found_after_it_fails_alone(
    group: KVGroupSpec, raised: bool
) -> None:
    """What is not finite since the first chunk shows in the logits, which are those of the last one."""
    rig = overlapping(max_num_batched_tokens=4, max_num_seqs=4, groups=(group,))
    rig.add("a", 25)
    for _ in range(6):
        rig.step()
    step, prompt = rig.plan(), rig.requests[0].prompt_token_ids.tolist()
    assert rig.scheduler._state.kv.num_blocks_held([0]) < [6], "it has left some"
    assert fail(rig, step, *([] if raised else [0])) == {"a": RequestStatus.FINISHED_ERROR}
    assert cached_tokens(rig, prompt) == (24 if raised else 0)


@pytest.mark.parametrize("raised", [True, False], ids=["step", "row"])
def test_blocks_of_an_ended_row_that_fails_alone_are_not_found_whichever_step_filled_them(raised: bool) -> None:
    rig = overlapping(max_num_batched_tokens=4, max_num_seqs=4)
    rig.add("a", PROMPT)
    first, second = rig.plan(), rig.plan()
    rig.deliver(first)
    rig.abort("a")
    assert fail(rig, second, *([] if raised else second.output.rows.tolist())) == {}
    assert cached_tokens(rig, PROMPT) == (4 if raised else 0)


@pytest.mark.parametrize("raised", [True, False], ids=["step", "row"])
def test_a_request_that_found_a_failed_prefix_in_a_later_step_is_computed_again(raised: bool) -> None:
    rig = overlapping()
    rig.add("a", PROMPT)
    first = rig.plan()
    rig.add("b", [*PROMPT, 50])
    rig.add("c", 5)
    second = rig.plan()
    assert second.cached["b"] == 8
    assert fail(rig, first, *([] if raised else first.output.rows.tolist())) == {"a": RequestStatus.FINISHED_ERROR}
    assert (rig.waiting, rig.running) == (["b"], ["c"])
    again = rig.plan()
    assert (again.cached["b"], again.scheduled["b"]) == (0, 10)
    assert rig.deliver(second).emitted == {"c": [FILL]}
    assert rig.deliver(again, {"b": [51]}).emitted["b"] == [51]


def test_a_request_that_found_a_failed_prefix_in_the_same_step_is_computed_again() -> None:
    rig = overlapping()
    rig.add("a", PROMPT)
    rig.add("b", [*PROMPT, 50])
    step = rig.plan()
    assert step.cached == {"a": 0, "b": 8}
    assert fail(rig, step, 0) == {"a": RequestStatus.FINISHED_ERROR}
    assert step.emitted == {}
    assert rig.plan().scheduled == {"b": 10}


def test_sequences_that_forked_in_flight_after_a_chunk_that_fails_are_computed_again() -> None:
    rig = overlapping(max_num_batched_tokens=8)
    rig.add("a", 12, n=3)
    first, second = rig.plan(), rig.plan()
    assert len(second.output.forks) == 2
    assert fail(rig, first) == {"a/0": RequestStatus.FINISHED_ERROR}
    assert rig.deliver(second).emitted == {}
    assert rig.waiting == ["a"]
    assert rig.run() == {"a/1": [FILL] * 8, "a/2": [FILL] * 8}


def test_siblings_that_copied_a_block_of_a_failed_chunk_in_flight_are_computed_again() -> None:
    rig = overlapping(max_num_batched_tokens=4, max_num_seqs=3, pipeline_depth=3)
    rig.add("a", 6, n=2)
    first, second, third = rig.plan(), rig.plan(), rig.plan()
    assert len(third.output.copies) == 1
    assert fail(rig, first) == {"a/0": RequestStatus.FINISHED_ERROR}
    for step in (second, third):
        assert rig.deliver(step).emitted == {}
    assert rig.run() == {"a/1": [FILL] * 8}


def test_siblings_of_a_failed_leader_keep_their_place_before_a_newer_request_that_is_computed_again() -> None:
    rig = overlapping(long_prefill_token_threshold=8)
    rig.add("a", [*PROMPT[:8], 1, 2, 3], n=2)
    rig.add("b", PROMPT)
    step = rig.plan()
    assert (step.scheduled, step.cached) == ({"a/0": 8, "b": 1}, {"a/0": 0, "b": 8})
    assert fail(rig, step, 0) == {"a/0": RequestStatus.FINISHED_ERROR}
    assert rig.waiting == ["a", "b"]
    assert rig.scheduler.make_stats().preemptions == 2
    assert rig.step().preempted == ("b", "a")
    assert set(rig.run()) == {"a/1", "b"}


def test_a_sibling_of_a_failed_leader_that_does_not_read_the_cache_fills_it() -> None:
    rig = Rig(enable_prefix_caching=True, max_num_batched_tokens=8)
    rig.add("a", PROMPT, n=2, skip_prefix_read=True)
    step = rig.plan()
    assert fail(rig, step, *step.output.rows.tolist()) == {"a/0": RequestStatus.FINISHED_ERROR}
    assert rig.step().scheduled == {"a/1": 8}
    assert rig.step().emitted == {"a/1": [FILL]}
    assert cached_tokens(rig, PROMPT) == 8


def test_siblings_of_a_row_that_fails_alone_continue() -> None:
    rig = overlapping()
    rig.add("a", 6, n=2)
    rig.step()
    step = rig.plan()
    assert fail(rig, step, step.output.rows.tolist()[0]) == {"a/0": RequestStatus.FINISHED_ERROR}
    assert rig.running == ["a"]


def test_blocks_that_a_failed_row_shares_with_a_sibling_are_not_found_after_the_sibling_ends() -> None:
    rig = overlapping(max_num_batched_tokens=3, max_num_seqs=2)  # no chunk fills a block when the request enters
    rig.add("a", PROMPT, max_tokens=0, n=2)
    rig.step()
    rig.step()
    step = rig.plan()
    assert fail(rig, step, step.output.forks[0].dst)["a/1"] is RequestStatus.FINISHED_ERROR
    assert cached_tokens(rig, PROMPT) == 0


def test_a_request_swapped_out_after_its_step_failed_is_computed_again() -> None:
    rig = overlapping(
        num_blocks=7, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, watermark=0.0, pipeline_depth=3
    )
    rig.add("a", PROMPT[:8], max_tokens=20)
    first = rig.plan()
    rig.add("b", [*PROMPT, 50], max_tokens=20)
    steps = [rig.plan()]
    assert steps[0].cached["b"] == 8
    rig.deliver(first)
    while not rig.swapped:
        steps.append(rig.plan())
        if not rig.swapped:
            rig.deliver(steps.pop(0))
    assert rig.swapped == ["b"]
    assert fail(rig, steps.pop(0)) == {"a": RequestStatus.FINISHED_ERROR, "b": RequestStatus.FINISHED_ERROR}
    for step in steps:
        rig.deliver(step)
    assert rig.scheduler.make_stats().num_free_host_blocks == 16
    rig.plan()
    assert rig.free == 7


def test_a_sibling_swapped_out_before_it_computed_on_blocks_of_a_failed_step_is_computed_again() -> None:
    rig = overlapping(num_blocks=5, num_host_blocks=8)
    rig.add("a", 7, max_tokens=20)
    rig.add("q", 4, n=2)
    rig.step()
    assert rig.scheduler.reset_prefix_cache(preempt_running=True)
    first = rig.plan()
    assert (first.scheduled, first.cached["q/1"]) == ({"a": 8, "q/0": 5}, 4)
    second = rig.plan()
    assert (second.scheduled, rig.swapped) == ({"a": 1}, ["q"])
    assert fail(rig, first) == {"a": RequestStatus.FINISHED_ERROR, "q/0": RequestStatus.FINISHED_ERROR}
    assert (rig.swapped, rig.waiting, rig.scheduler.make_stats().num_free_host_blocks) == ([], ["q"], 8)
    assert rig.deliver(second).emitted == {}
    assert rig.plan().cached == {"q/1": 0}


def test_the_output_of_an_encoder_run_in_a_failed_step_is_computed_again() -> None:
    image = MediaItem("image", 2, 4)
    rig = overlapping(encoder_budget=8, encoder_cache_tokens=8)
    rig.add("a", PROMPT, media=(image,))
    first = rig.plan()
    rig.add("b", [1, *PROMPT], media=(image,))
    second = rig.plan()
    assert (len(first.output.encoder_runs), second.output.encoder_runs) == (1, ())
    assert fail(rig, first) == {"a": RequestStatus.FINISHED_ERROR}
    again = rig.plan()
    assert again.output.encoder_freed == ("image",)
    assert [run.content_hash for run in again.output.encoder_runs] == ["image"]
    assert rig.deliver(second).emitted == {}
    assert rig.deliver(again).emitted == {"b": [FILL]}


def test_blocks_of_a_row_that_left_after_it_read_an_encoder_output_of_a_failed_step_are_not_found() -> None:
    image = MediaItem("image", 2, 4)
    rig = overlapping(encoder_budget=8, encoder_cache_tokens=8)
    rig.add("a", PROMPT, media=(image,))
    first = rig.plan()
    rig.add("b", [1, *PROMPT], media=(image,))
    second = rig.plan()
    rig.abort("b")
    assert fail(rig, first) == {"a": RequestStatus.FINISHED_ERROR}
    rig.deliver(second)
    rig.add("c", [1, *PROMPT], media=(image,))
    step = rig.step()
    assert (step.cached, len(step.output.encoder_runs)) == ({"c": 0}, 1)


def test_a_row_that_outgrows_the_pool_ends_after_its_token_in_flight_with_the_same_output() -> None:
    outputs: list[dict[str, list[int]]] = []
    for depth in (1, 2, 3):
        rig = Rig(num_blocks=3, pipeline_depth=depth, async_scheduling=depth > 1)
        rig.add("a", 6, max_tokens=30)
        steps, tokens, ends = [], [], {}
        while rig.scheduler.has_unfinished_requests() or steps:
            steps.append(rig.plan())
            if len(steps) == depth:
                done = rig.deliver(steps.pop(0)) if not steps[0].output.is_empty else steps.pop(0)
                tokens += done.emitted.get("a", [])
                ends |= done.finished
            if not rig.scheduler.has_unfinished_requests() and all(step.output.is_empty for step in steps):
                break
        outputs.append({"a": tokens})
    assert outputs[0] == outputs[1] == outputs[2] == {"a": [FILL] * 7}


def test_an_encoder_run_that_passed_to_a_beam_search_which_ends_in_the_same_plan_is_not_counted_as_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(
        max_num_batched_tokens=8,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        encoder_budget=8,
        encoder_cache_tokens=8,
        long_prefill_token_threshold=4,
    )
    rig.add("v", 17, media=(MediaItem("x", 12, 4),), priority=1)
    rig.step()
    rig.add("b", 13, media=(MediaItem("x", 4, 4),), priority=0, n=2, beam_search=BeamSearchOptions())
    rig.step()
    tables, row = rig.scheduler._state.kv.tables, next(row for row, name in rig.owners.items() if name == "b/0")
    allocate = tables.allocate_slots

    def none_for_row(rows: np.ndarray, ends: np.ndarray) -> int:
        before = np.append(np.flatnonzero(rows == row), len(rows))[0]
        return allocate(rows[:before], ends[:before]) if before else 0

    monkeypatch.setattr(tables, "allocate_slots", none_for_row)
    ended = rig.plan()  # v runs x and is preempted for b, which has outgrown the pool
    assert (ended.scheduled, ended.output.encoder_runs, ended.output.encoder_inputs) == ({}, (), ())
    monkeypatch.undo()
    given: list[str] = []
    while rig.scheduler.has_unfinished_requests():
        given += [item.content_hash for item in rig.step().output.encoder_inputs]
    assert given == ["x"]
