"""What holds a request back: its grammar, its adapter; and that only owners write their columns."""

import random
from collections import Counter

import pytest

from pagoda.base.config import SchedulingPolicy
from pagoda.base.errors import RequestError
from pagoda.core import planning
from pagoda.core.events import Held, Reason
from pagoda.core.policy import RequestQueue
from pagoda.core.request import LoraRef, Request, RequestKey, RequestState, RequestStatus
from pagoda.core.rules import why_skipped, why_stopped
from pagoda.core.state import SchedulerState
from pagoda.core.step_plan import StepPlan
from tests.core.rig import Rig


class FakePreparations:
    """Grammars that are ready, those that cannot be had, and how often each is pinned."""

    def __init__(self, *ready: str) -> None:
        self.ready, self.broken = set(ready), set[str]()
        self.pins: Counter[str] = Counter()
        self.waiting: dict[RequestKey, str] = {}  # request -> grammar
        self.num_asked = 0

    def why_not_ready(self, request: Request) -> Reason | None:
        self.num_asked += 1
        if request.grammar in self.broken:
            raise RequestError(f"no {request.grammar}")
        if request.grammar is None or request.grammar in self.ready:
            return None
        self.waiting[request.key] = request.grammar
        return Reason.GRAMMAR

    def take_woken(self) -> list[RequestKey]:
        woken = [name for name, grammar in self.waiting.items() if grammar in self.ready | self.broken]
        for name in woken:
            del self.waiting[name]
        return woken

    def forget(self, request: Request) -> None:
        self.waiting.pop(request.key, None)

    def pin(self, request: Request) -> None:
        if request.grammar is not None:
            assert request.grammar in self.ready
            self.pins[request.grammar] += 1

    def unpin(self, request: Request) -> None:
        if request.grammar is not None:
            assert self.pins[request.grammar] > 0
            self.pins[request.grammar] -= 1


def test_what_running_requests_need_is_pinned() -> None:
    ready = FakePreparations("a", "b")
    rig = Rig(preparations=ready, num_blocks=9)
    for name in "abc":
        rig.add(name, 8, max_tokens=8, grammar="ab"[name == "b"])
    most = 0
    for _ in range(60):
        rig.step()
        assert ready.pins["a"] == sum(name in rig.running for name in "ac")
        assert ready.pins["b"] == ("b" in rig.running)
        most = max(most, ready.pins.total())
    assert most > 1
    assert not rig.running
    assert not +ready.pins
    assert rig.scheduler.make_stats().preemptions


def test_thousands_that_wait_for_a_grammar_cost_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = FakePreparations("runs")
    rig = Rig(preparations=ready, num_blocks=64)
    rig.add("a", 4, max_tokens=40, grammar="runs")
    for number in range(5000):
        rig.add(f"w{number}", 4, max_tokens=1, grammar=f"g{number}")
    rig.step()  # each is considered once
    assert len(rig.waiting) == len(rig.scheduler._state.waiting._aside) == 5000
    ready.num_asked = 0
    monkeypatch.setattr(planning, "why_skipped", None)  # nothing is considered
    for _ in range(10):
        assert rig.step().scheduled == {"a": 1}
    monkeypatch.undo()
    assert ready.num_asked == 0
    ready.ready |= {"g7", "g2000"}
    assert rig.step().scheduled == {"a": 1, "w7": 4, "w2000": 4}
    assert ready.num_asked == 2


def test_a_request_waits_for_what_it_needs_and_others_pass() -> None:
    ready = FakePreparations("b")
    rig = Rig(decision_log_steps=8, preparations=ready)
    rig.add("a", 4, grammar="a")
    rig.add("b", 4, grammar="b")
    assert rig.step().scheduled == {"b": 4}
    assert rig.waiting == ["a"]
    _, held = rig.scheduler.explain.of_request("a")
    assert isinstance(held, Held)
    assert (held.step, held.reason) == (1, Reason.GRAMMAR)
    ready.ready.add("a")
    assert rig.step().scheduled == {"b": 1, "a": 4}


def reasons(rig: Rig, name: str) -> list[Reason]:
    """Return why a request was held, in the order of the events."""
    return [event.reason for event in rig.scheduler.explain.of_request(name) if isinstance(event, Held)]


def test_what_was_set_aside_waits_for_its_turn_once_it_is_ready() -> None:
    ready = FakePreparations()
    rig = Rig(decision_log_steps=99, preparations=ready, max_num_seqs=2)
    rig.add("a", 4, max_tokens=20)
    rig.add("b", 4, max_tokens=20, grammar="b")
    rig.add("c", 4, grammar="c")
    rig.add("d", 4, max_tokens=20)
    rig.step()
    assert rig.running == ["a", "d"]
    assert rig.scheduler.make_stats().num_deferred == 2
    ready.ready |= {"b", "c"}
    rig.step()
    assert rig.scheduler.make_stats().num_deferred == 0
    assert reasons(rig, "b") == [Reason.GRAMMAR, Reason.NUM_SEQS]
    assert reasons(rig, "c") == [Reason.GRAMMAR, Reason.TURN]
    held = [event for event in rig.scheduler.explain.of_request("c") if isinstance(event, Held)][-1]
    assert (held.step, held.position) == (2, 1)
    rig.step()
    assert reasons(rig, "c") == [Reason.GRAMMAR, Reason.TURN]  # said once


def test_a_request_that_another_one_passes_waits_for_its_turn() -> None:
    rig = Rig(decision_log_steps=99, max_num_seqs=1, scheduling_policy=SchedulingPolicy.PRIORITY)
    rig.add("a", 4, max_tokens=20)
    rig.add("c", 4, priority=2)
    rig.step()
    assert reasons(rig, "c") == [Reason.NUM_SEQS]
    rig.add("b", 4, priority=1)
    rig.step()
    assert (reasons(rig, "b"), reasons(rig, "c")) == ([Reason.NUM_SEQS], [Reason.NUM_SEQS, Reason.TURN])
    rig.abort("b")
    rig.step()
    assert reasons(rig, "c") == [Reason.NUM_SEQS, Reason.TURN, Reason.NUM_SEQS]


def test_a_request_waits_for_its_adapter_while_the_batch_has_no_room_for_it_and_then_for_its_turn() -> None:
    rig = Rig(decision_log_steps=99, max_num_seqs=2, max_loras=1, scheduling_policy=SchedulingPolicy.PRIORITY)
    rig.add("a", 4, max_tokens=20, lora=LoraRef("one"))
    rig.add("b", 4, max_tokens=20, lora=LoraRef("two"))
    rig.add("c", 4, max_tokens=20)
    rig.step()
    assert rig.running == ["a", "c"]
    rig.add("d", 4, n=2, priority=-1)
    rig.step()  # `d` stops the queue before `b`
    assert (reasons(rig, "d"), reasons(rig, "b")) == ([Reason.NUM_SEQS], [Reason.LORA])
    assert rig.scheduler.make_stats().num_deferred == 1
    rig.abort("a")
    rig.step()
    assert reasons(rig, "b") == [Reason.LORA, Reason.TURN]
    assert rig.scheduler.make_stats().num_deferred == 0


def test_a_request_that_cannot_have_what_it_needs_ends_alone() -> None:
    ready = FakePreparations("b")
    rig = Rig(preparations=ready)
    rig.add("a", 4, grammar="a")
    rig.add("b", 4, grammar="b")
    rig.step()
    ready.broken.add("a")
    step = rig.step()
    assert step.scheduled == {"b": 1}
    assert not rig.waiting
    assert not step.output.admitted
    (finish,) = [finish for finish in step.finishes if finish.request_id == "a"]
    assert (finish.status, finish.message) == (RequestStatus.FINISHED_ERROR, "no a")


@pytest.mark.parametrize(
    ("skipped", "stopped", "entered"),
    [(Reason.GRAMMAR, None, ["b", "d"]), (Reason.LORA, None, ["b"]), (None, Reason.DELAY, [])],
)
def test_a_rule_holds_back_a_request_or_its_adapter_or_the_queue(
    skipped: Reason | None, stopped: Reason | None, entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """a and d have an adapter: holding back a's adapter holds d back too; the queue: everything after a."""

    def skip(state: SchedulerState, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Reason | None:
        return skipped if request.spec.handle % 2 else why_skipped(state, request, queue, plan)

    def stop(state: SchedulerState, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Reason | None:
        return stopped if request.spec.handle % 2 else why_stopped(state, request, queue, plan)

    monkeypatch.setattr(planning, "why_skipped", skip)
    monkeypatch.setattr(planning, "why_stopped", stop)
    rig = Rig()
    adapter = LoraRef("x")
    for name, lora in (("a", adapter), ("b", None), ("c", None), ("d", adapter)):
        rig.add(name, 3, lora=lora)
    rig.step()
    assert rig.running == entered
    assert rig.waiting == [name for name in "abcd" if name not in entered]


@pytest.mark.parametrize("seed", range(6))
def test_the_adapters_in_use_are_those_of_the_running_requests(seed: int) -> None:
    """Through preemption by recompute and swap, aborts, resets, ends and refusals."""
    rng = random.Random(seed)
    rig = Rig(num_blocks=9, num_host_blocks=rng.choice([0, 20]), max_num_seqs=4, max_loras=2)
    adapters = {f"r{number}": rng.choice([None, LoraRef("x"), LoraRef("y"), LoraRef("z")]) for number in range(80)}
    for number in range(120):
        if number < 80 and rng.random() < 0.4:
            name = f"r{number}"
            tokens, most = rng.randint(1, 12), rng.randint(1, 16)
            rig.add(name, tokens, max_tokens=most, n=rng.choice([1, 1, 2]), lora=adapters[name])
        if rng.random() < 0.1 and rig.running:
            rig.abort(rng.choice(rig.running))
        if rng.random() < 0.05:
            rig.scheduler.reset_prefix_cache(preempt_running=True)
        rig.step()
        running = Counter(lora.identity for name in rig.running if (lora := adapters[name]) is not None)
        assert rig.scheduler._state.batch._num_using == running
        assert len(running) <= 2
    assert rig.scheduler.make_stats().preemptions > 0


def test_columns_are_readable_by_all_and_writable_by_their_owner() -> None:
    rig = Rig()
    rig.add("a", 6)
    rig.step()
    table, tables = rig.scheduler._state.table, rig.scheduler._state.kv.tables
    columns = {
        name: column for name, column in vars(table).items() if not name.startswith("_") and hasattr(column, "flags")
    }
    assert len(columns) == 13
    for name, column in (*columns.items(), ("reserved_until", tables.reserved_until)):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0
        assert not column.flags.writeable, name
    assert table.num_tokens[0] == 7
    assert tables.reserved_until[0] == 8


def test_adapters_of_equal_contents_count_as_one() -> None:
    rig = Rig(max_loras=1)
    rig.add("a", 4, lora=LoraRef("a", "/a", "1"))
    rig.add("same", 4, lora=LoraRef("b", "/b", "1"))
    rig.add("other", 4, lora=LoraRef("a", "/a", "2"))
    assert rig.step().scheduled == {"a": 4, "same": 4}
    stats = rig.scheduler.make_stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (("a", "b"), ("a",))


def test_steady_traffic_for_one_adapter_does_not_hold_back_another() -> None:
    rig = Rig(max_loras=1, max_num_seqs=2)
    rig.add("a0", 4, max_tokens=8, lora=LoraRef("a"))
    rig.step()
    rig.add("b", 4, max_tokens=1, lora=LoraRef("b"))
    entered: list[str] = []
    for number in range(1, 100):
        rig.add(f"a{number}", 4, max_tokens=8, lora=LoraRef("a"))
        step = rig.step()
        entered += step.kinds
        if "b" in step.kinds:
            break
    assert entered[-1] == "b"
    assert 64 < number < 64 + 2 * 8, "newcomers pass it for 64 steps; then those that run go to their ends"
    assert all(name.startswith("a") for name in rig.run(limit=1000)), "and the others follow"


def test_a_request_that_has_run_does_not_close_the_batch_for_what_it_waited_before() -> None:
    rig = Rig(num_blocks=64, max_loras=1, max_num_seqs=2, scheduling_policy=SchedulingPolicy.PRIORITY)
    rig.add("a", 4, max_tokens=70, ignore_eos=True, lora=LoraRef("a"))
    rig.step()
    rig.add("b", 4, max_tokens=9, ignore_eos=True, lora=LoraRef("b"))
    while "b" not in rig.running:
        rig.step()
    rig.scheduler.reset_prefix_cache(preempt_running=True)
    rig.add("first", 4, priority=-1, lora=LoraRef("a"))
    rig.add("last", 4, priority=1, lora=LoraRef("a"))
    assert list(rig.step().kinds) == ["first", "last"], "b waits for the first time since it ran"
