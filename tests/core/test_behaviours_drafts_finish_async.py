"""Drafts, adapters, finish and abort, steps in flight, outputs, with small numbers."""

from dataclasses import replace

import numpy as np
import pytest

from pagoda.base.config import PreemptionMode
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec, KVShape
from pagoda.core.request import AdmitKind, LoraRef, RequestStatus
from pagoda.core.scheduler_output import ModelRunnerOutput
from tests.core.rig import FILL, PlannedStep, Rig

STATES = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, (1,))


def drafting(prompt: int = 6, max_tokens: int = 30, **config: object) -> Rig:
    """A request that has said its first token."""
    rig = Rig(**config)
    rig.add("a", prompt, max_tokens=max_tokens)
    rig.step({"a": [50]})
    return rig


def verify(rig: Rig, drafts: list[int], said: list[int]) -> PlannedStep:
    rig.offer({"a": drafts})
    return rig.step({"a": said})


@pytest.mark.parametrize(("said", "computed"), [([51, 52, 53, 54], 10), ([51, 99], 8), ([99], 7)])
def test_rejected_drafts_lower_the_computed_count(said: list[int], computed: int) -> None:
    rig = drafting()
    step = verify(rig, [51, 52, 53], said)
    assert step.scheduled == {"a": 4}
    assert step.emitted == {"a": said}
    assert rig.computed("a") == computed


def test_drafts_are_cut_by_the_budget() -> None:
    rig = drafting(max_num_batched_tokens=6, max_num_seqs=6)
    rig.add("b", 2)
    rig.step()
    rig.offer({"a": [51, 52, 53], "b": [51, 52, 53]})
    plan = rig.plan()
    assert plan.scheduled == {"a": 4, "b": 2}
    assert {plan.owners[row]: drafts.tolist() for row, drafts in plan.output.drafts.items()} == {
        "a": [51, 52, 53],
        "b": [51],
    }


def test_drafts_stay_within_the_model() -> None:
    rig = drafting(max_model_len=9)
    step = verify(rig, [51, 52, 53], [51, 52])
    assert step.scheduled == {"a": 2}
    assert step.finished == {"a": "length"}


def test_drafts_during_a_prefill_are_dropped() -> None:
    rig = Rig(max_num_batched_tokens=50, num_blocks=40)
    rig.add("a", 80)
    rig.step()
    rig.offer({"a": [51, 52, 53]})
    assert rig.step().scheduled == {"a": 30}


def test_a_stop_token_among_accepted_drafts_drops_the_rest() -> None:
    rig = Rig()
    rig.add("a", 6, max_tokens=30, stop_token_ids=(52,))
    rig.step({"a": [50]})
    step = verify(rig, [51, 52, 53], [51, 52, 53, 54])
    assert step.emitted == {"a": [51, 52]}
    assert step.finished == {"a": "stop"}
    assert step.finishes[0].stop_reason == 52
    assert rig.free == 16


def test_max_tokens_among_accepted_drafts_drops_the_rest() -> None:
    rig = drafting(max_tokens=3)
    step = verify(rig, [51, 52, 53], [51, 52, 53, 54])
    assert step.emitted == {"a": [51, 52]}
    assert step.finished == {"a": "length"}


def test_slots_of_rejected_drafts_are_used_again() -> None:
    rig = drafting()
    verify(rig, [51, 52, 53], [99])
    assert rig.blocks("a") == [3]
    for _ in range(5):
        rig.step()
    assert rig.blocks("a") == [3]


@pytest.mark.parametrize(
    ("names", "drafted", "scheduled", "num_preemptions"),
    [("ab", "a", {"a": 4}, 1), ("ab", "b", {"a": 1}, 1), ("a", "a", {"a": 1}, 0)],
    ids=["preempts a newer request", "preempts itself", "drops its drafts"],
)
def test_drafts_without_a_free_block_cause_a_preemption(
    names: str, drafted: str, scheduled: dict[str, int], num_preemptions: int
) -> None:
    """Drafts are tokens like all others (conformance: draft_preempt); only a request that runs alone drops them."""
    rig = Rig(num_blocks=2 * len(names))
    for name in names:
        rig.add(name, 6)
    rig.step()
    rig.offer({drafted: [51, 52, 53]})
    assert rig.step().scheduled == scheduled
    assert (rig.scheduler.make_stats().preemptions, rig.scheduler._state.drafts.offered) == (num_preemptions, {})


# Drafts with states


@pytest.mark.parametrize(
    ("said", "computed", "states", "scheduled"),
    [
        ([51, 52, 53, 54], 10, 2, 1),  # all are right: the state after them is the second one of their step
        ([51, 52, 99], 7, 3, 3),  # the state before them stays, and the right ones are computed again
        ([99], 7, 3, 1),
    ],
)
def test_states_after_drafts(said: list[int], computed: int, states: int, scheduled: int) -> None:
    rig = drafting(groups=(KVGroupSpec(), STATES))
    step = verify(rig, [51, 52, 53], said)
    assert (step.scheduled, step.emitted) == ({"a": 4}, {"a": said})
    assert (rig.computed("a"), rig.blocks("a")[1]) == (computed, states)
    assert rig.step().scheduled == {"a": scheduled}


def test_right_drafts_are_computed_again_with_the_next_ones() -> None:
    rig = drafting(groups=(STATES,), long_prefill_token_threshold=2)
    rig.add("b", 4)
    rig.step()
    verify(rig, [51, 52, 53], [51, 52, 99])
    rig.offer({"a": [60, 61]})
    assert rig.step().scheduled["a"] == 3 + 2


def test_drafts_are_at_most_a_block_where_there_are_states() -> None:
    assert verify(drafting(groups=(STATES,)), [51, 52, 53, 54, 55, 56], [99]).scheduled == {"a": 1 + 4}


@pytest.mark.parametrize("groups", [(STATES,), (KVGroupSpec(), STATES)], ids=["states", "attention, too"])
def test_drafts_without_room_for_a_state_are_dropped(groups: tuple[KVGroupSpec, ...]) -> None:
    """A sequence that lost its state would be computed again as a whole."""
    rig = Rig(num_blocks=4, groups=groups)
    for name in "ab":
        rig.add(name, 6)
    rig.step()
    assert rig.free == 0
    rig.offer({"a": [51, 52, 53], "b": [51, 52, 53]})
    step = rig.step()
    assert (step.scheduled, step.preempted, rig.scheduler._state.drafts.offered) == ({"a": 1, "b": 1}, (), {})


def test_as_many_sequences_as_run_at_once_have_states_for_drafts() -> None:
    """Of states so large that few snapshots could make room, and attention so large that it does not bound them."""
    groups = (KVGroupSpec(shape=KVShape(1, 1 << 16)), replace(STATES, shape=KVShape(1, 1 << 17)))
    rig = Rig(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256, groups=groups)
    for name in (names := [str(number) for number in range(32)]):
        rig.add(name, 6, max_tokens=30)
    rig.step()
    for number in range(6):
        rig.offer({name: [51, 52, 53] for name in names})
        step = rig.step({name: [[99], [51, 52, 53, 54]][(number + len(name)) % 2] for name in names})
        assert {step.owners[row]: len(drafts) for row, drafts in step.output.drafts.items()} == dict.fromkeys(names, 3)


def test_draft_stats() -> None:
    rig = drafting()
    verify(rig, [51, 52, 53], [51, 52, 99])
    verify(rig, [60, 61], [99])
    stats = rig.scheduler.make_stats()
    assert (stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (2, 5, 2)


def test_admitted_requests_are_not_padded_with_drafts() -> None:
    rig = drafting()
    rig.add("b", 1)
    step = rig.step()
    assert step.scheduled == {"a": 1, "b": 1}
    assert step.output.drafts == {}


# Adapters


def test_requests_over_the_adapter_limit_are_skipped() -> None:
    rig = Rig(max_loras=1)
    for name, lora in (("a", "1"), ("b", "2"), ("c", None), ("d", "1"), ("e", "2")):
        rig.add(name, 4, lora=LoraRef(lora) if lora else None)
    assert list(rig.step().scheduled) == ["a", "c", "d"]
    assert rig.waiting == ["b", "e"]


def test_an_adapter_is_free_after_its_last_request() -> None:
    rig = Rig(max_loras=1, num_blocks=5)
    rig.add("a", 8, max_tokens=9, lora=LoraRef("x"))
    rig.add("b", 7, lora=LoraRef("x"))
    while rig.waiting != ["b"]:
        rig.step()
    rig.add("c", 1, lora=LoraRef("y"))
    rig.abort("b")
    assert list(rig.step().scheduled) == ["a"]


# Finish and abort


@pytest.mark.parametrize(
    ("facts", "said", "reason", "stop"),
    [
        ({"eos_token_ids": (2,)}, 2, "stop", None),
        ({"stop_token_ids": (42,)}, 42, "stop", 42),
        ({"eos_token_ids": (2,), "stop_token_ids": (2,)}, 2, "stop", None),
        ({"max_tokens": 1, "stop_token_ids": (42,)}, 42, "stop", 42),
        ({"max_tokens": 1}, 7, "length", None),
    ],
)
def test_order_of_the_tests(facts: dict[str, object], said: int, reason: str, stop: int | None) -> None:
    rig = Rig()
    rig.add("a", 4, **facts)
    step = rig.step({"a": [said]})
    assert step.finished == {"a": reason}
    assert step.finishes[0].stop_reason == stop
    assert step.emitted == {"a": [said]}


def test_ignore_eos() -> None:
    rig = Rig()
    rig.add("a", 4, max_tokens=2, eos_token_ids=(2,), ignore_eos=True)
    assert rig.step({"a": [2]}).finished == {}
    assert rig.step({"a": [2]}).finished == {"a": "length"}


def test_nothing_stops_below_min_tokens() -> None:
    rig = Rig()
    rig.add("a", 4, max_tokens=9, min_tokens=3, eos_token_ids=(2,), stop_token_ids=(42,))
    assert rig.step({"a": [2]}).finished == {}
    assert rig.step({"a": [42]}).finished == {}
    assert rig.step({"a": [2]}).finished == {"a": "stop"}


def test_abort_in_every_queue() -> None:
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
    rig.add("a", 8)
    rig.add("b", 7)
    while not rig.swapped:
        rig.step()
    rig.add("c", 4)
    rig.abort("a", "b", "c", "unknown", "a")
    assert (rig.running, rig.swapped, rig.waiting) == ([], [], [])
    assert rig.free == 5
    assert rig.scheduler.make_stats().num_free_host_blocks == 8


def test_finished_requests_are_sent_once() -> None:
    rig = Rig()
    rig.add("a", 4, max_tokens=1)
    rig.add("b", 4)
    rig.step()
    assert rig.step().output.finished == (rig.key("a"),)
    rig.abort("b")
    step = rig.plan()
    assert step.output.is_empty
    assert step.output.finished == (rig.key("b"),)
    assert len(step.output.released) == 1
    assert rig.plan().output.finished == ()


# Steps in flight


def test_no_step_is_scheduled_past_the_last_token() -> None:
    rig = Rig(pipeline_depth=2, async_scheduling=True)
    rig.add("a", 6, max_tokens=4)
    planned, in_flight = [], []
    while rig.scheduler.has_unfinished_requests():
        in_flight.append(rig.plan())
        planned.append(in_flight[-1].output.total_num_scheduled_tokens)
        if len(in_flight) == 2:
            rig.deliver(in_flight.pop(0))
    assert [count for count in planned if count] == [6, 1, 1, 1]


def test_the_step_past_an_early_eos_is_dropped() -> None:
    rig = Rig(pipeline_depth=2, async_scheduling=True)
    rig.add("a", 6, max_tokens=9, eos_token_ids=(2,))
    first, second = rig.plan(), rig.plan()
    assert rig.deliver(first, {"a": [2]}).finished == {"a": "stop"}
    assert rig.free == 16
    step = rig.deliver(second)
    assert (step.emitted, step.finished) == ({}, {})


def test_abort_in_flight() -> None:
    rig = Rig(pipeline_depth=2, async_scheduling=True)
    rig.add("a", 12)
    first = rig.plan()
    rig.abort("a")
    assert rig.free == 16
    rig.add("b", 12)
    second = rig.plan()
    assert rig.deliver(first).emitted == {}
    assert rig.deliver(second).emitted == {"b": [7]}


def test_preempted_in_flight_the_token_counts() -> None:
    rig = Rig(pipeline_depth=2, async_scheduling=True, num_blocks=5)
    rig.add("a", 8)
    rig.add("b", 7)
    in_flight = [rig.plan(), rig.plan()]
    rig.deliver(in_flight.pop(0))
    in_flight.append(rig.plan())
    assert in_flight[-1].preempted == ("b",)
    assert rig.computed("b") == 0
    assert rig.deliver(in_flight.pop(0)).emitted["b"] == [7]
    assert rig.computed("b") == 0
    rig.abort("a")
    step = rig.plan()
    assert step.scheduled == {"b": 9}
    assert step.kinds == {"b": AdmitKind.RESUMED}


def test_a_forced_reset_drops_it() -> None:
    rig = Rig(pipeline_depth=2, async_scheduling=True)
    rig.add("a", 8, max_tokens=2)
    first = rig.plan()
    rig.scheduler.reset_prefix_cache(preempt_running=True)
    second = rig.plan()
    assert second.scheduled == {"a": 8}
    assert rig.deliver(first, {"a": [50]}).emitted == {}
    assert rig.deliver(second, {"a": [51]}).emitted == {"a": [51]}


def test_two_in_flight_without_async() -> None:
    rig = Rig(pipeline_depth=2)
    rig.add("a", 6, max_tokens=3)
    first = rig.plan()
    rig.add("b", 6, max_tokens=3)
    second = rig.plan()
    assert second.scheduled == {"b": 6}
    said = [rig.deliver(first).emitted]
    third = rig.plan()
    assert third.scheduled == {"a": 1}
    said += [rig.deliver(second).emitted, rig.deliver(third).emitted]
    assert said == [{"a": [7]}, {"b": [7]}, {"a": [7]}]


def test_computed_rises_when_planned() -> None:
    rig = Rig()
    rig.add("a", 6)
    step = rig.plan()
    assert rig.computed("a") == 6
    rig.deliver(step)
    assert rig.computed("a") == 6


# Outputs


def test_counts_and_deltas() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("a", 6)
    rig.add("b", 14)
    output = rig.plan().output
    assert output.total_num_scheduled_tokens == int(output.num_new.sum()) == 16
    assert {init.request_id: [len(table) for table in init.block_ids] for init in output.admitted} == {
        "a": [2],
        "b": [3],
    }
    assert output.admitted[0].token_ids.tolist() == list(range(1000, 1006))
    assert len(output.block_delta.rows) == 0
    rig = Rig()
    rig.add("a", 6)
    rig.step()
    assert len(rig.step().output.block_delta.rows) == 0
    rig.step()
    delta = rig.step().output.block_delta
    assert (delta.index.tolist(), len(delta.block_ids)) == ([2], 1)
    assert delta.rows.dtype == delta.block_ids.dtype == np.int32


def test_each_client_gets_only_its_own_outputs() -> None:
    rig = Rig()
    rig.add("a", 4, max_tokens=1, client_index=0)
    rig.add("b", 4, client_index=3)
    rig.add("c", 58, client_index=5)
    plan = rig.plan()
    count = len(plan.output.sample_rows)
    result = ModelRunnerOutput(plan.output.step, np.full((count, 1), 7, np.int32), np.ones(count, np.int32))
    outputs = rig.scheduler.update_from_output(plan.output, result)
    assert set(outputs) == {0, 3, 5}
    assert len(outputs[5].token_ids) == 0  # its prompt is not computed: what happened to it, no token
    assert all({event.client for event in of.events} == {client} for client, of in outputs.items())
    assert outputs[0].handles.tolist() == [1]
    assert outputs[0].ends[0].status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert outputs[3].handles.tolist() == [2]
    assert outputs[3].ends == []


def test_every_call_of_schedule_is_a_step() -> None:
    rig = Rig(pipeline_depth=2, async_scheduling=True)
    rig.add("a", 4)
    first, second = rig.plan(), rig.plan()
    assert (first.output.step, second.output.step) == (1, 2)
    assert (first.scheduled, second.scheduled) == ({"a": 4}, {"a": 1})


def test_a_first_token_that_is_not_finite_ends_its_request_alone() -> None:
    """Nothing of the step is left to emit for the client: the end is still reported, and the engine goes on."""
    rig = Rig()
    rig.add("a", 6)
    step = rig.plan()
    tokens = np.full((1, 1), -1, np.int32)
    failed = {int(step.output.sample_rows[0]): "logits are not finite"}
    result = ModelRunnerOutput(step.output.step, tokens, np.ones(1, np.int32), failed=failed)
    outputs = rig.scheduler.update_from_output(step.output, result)[0]
    assert [(finish.status, finish.message) for finish in outputs.ends] == [
        (RequestStatus.FINISHED_ERROR, "logits are not finite")
    ]
    assert len(outputs.token_ids) == 0
    assert not rig.scheduler.has_unfinished_requests()
    assert rig.free == 16


@pytest.mark.parametrize(
    ("budget", "scheduled"),
    [(16, [6, 6, 3, 1]), (9, [6, 1, 1, 1]), (4, [1, 1, 1, 1]), (24, [6, 6, 6, 6]), (23, [6, 6, 6, 5])],
)
def test_every_decoding_row_gets_a_token_before_drafts_take_the_rest(budget: int, scheduled: list[int]) -> None:
    rig = Rig(max_num_batched_tokens=budget, max_num_seqs=4, num_blocks=32)
    for name in "abcd":
        rig.add(name, 4, max_tokens=30)
    while rig.waiting or any(rig.computed(name) < 4 for name in "abcd"):
        rig.step()
    rig.offer({name: [1, 2, 3, 4, 5] for name in "abcd"})
    assert list(rig.plan().scheduled.values()) == scheduled


def test_drafts_leave_no_token_for_a_prompt() -> None:
    """a decodes, b is mid-prompt, c decodes: the drafts of a leave a token for c, which the prompt of b may take."""
    rig = Rig(max_num_batched_tokens=10, long_prefill_token_threshold=4, num_blocks=32)
    rig.add("a", 2, max_tokens=30)
    rig.add("b", 30)
    rig.add("c", 2, max_tokens=30)
    assert rig.step().scheduled == {"a": 2, "b": 4, "c": 2}
    rig.offer({"a": [1, 2, 3, 4, 5, 6, 7, 8, 9]})
    assert rig.plan().scheduled == {"a": 9, "b": 1}


def test_each_result_is_taken_once_and_in_the_order_of_planning() -> None:
    rig = Rig(pipeline_depth=2)
    rig.add("a", 6)
    first = rig.plan()
    rig.add("b", 6)
    second = rig.plan()
    with pytest.raises(ValueError, match="step 2 was planned after step 1, whose result is not back"):
        rig.deliver(second)
    other = ModelRunnerOutput(2, np.full((1, 1), 7, np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match="the result of step 2 was given for step 1"):
        rig.scheduler.update_from_output(first.output, other)
    assert rig.deliver(first).emitted == {"a": [FILL]}
    with pytest.raises(ValueError, match="step 1 is not in flight"):
        rig.deliver(first)
    with pytest.raises(ValueError, match="step 1 is not in flight"):
        rig.scheduler.fail_step(first.output, "it failed")
    assert rig.deliver(second).emitted == {"b": [FILL]}
    assert rig.run() == {"a": [FILL] * 7, "b": [FILL] * 7}
