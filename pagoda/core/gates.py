"""Gates: who may enter the running batch. To add one, write a class and add it to GATES."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from pagoda.core.decision_log import Reason
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.queues import RequestQueue
from pagoda.core.request import LoraRef, Request, RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.step_plan import StepPlan


class Skip(Enum):
    """What a closed gate holds back in this step."""

    REQUEST = "this request"
    KEY = "all requests with its LoRA adapter"
    QUEUE = "this request and all after it"


@dataclass(frozen=True, slots=True)
class Hold:
    """A gate's answer: not in this step."""

    reason: Reason
    skip: Skip


@dataclass(frozen=True, slots=True)
class GateContext:
    """What gates may look at.

    waiting: the queue of requests without KV; the other queue has swapped ones.
    is_grammar_ready: whether a request's grammar is compiled; None if no request has one.
    """

    config: SchedulerOptions
    table: RequestTable
    batch: RunningBatch
    in_flight: StepsInFlight
    waiting: RequestQueue
    is_grammar_ready: Callable[[Request], bool] | None = None


class Gate:
    """A condition for entering. A request that a gate holds back keeps its place in the queue."""

    def __init__(self, context: GateContext) -> None:
        self.context = context

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        """Whether the settings can ever close this gate."""
        return True

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        """Return None to let the first request of `queue` pass, or what to skip and why."""
        raise NotImplementedError

    def enter(self, request: RequestState) -> None:
        """The request enters the running batch. A gate that counts overrides this and `leave`."""

    def leave(self, request: RequestState) -> None:
        """The request leaves the running batch."""


class LoraGate(Gate):
    """At most `max_loras` distinct adapters in the running batch (0: any number)."""

    _HOLD = Hold(Reason.LORA, Skip.KEY)

    def __init__(self, context: GateContext) -> None:
        super().__init__(context)
        self._users: Counter[LoraRef] = Counter()

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.config.max_loras > 0

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        lora = request.facts.lora
        if lora is None or lora in self._users or len(self._users) < self.context.config.max_loras:
            return None
        return self._HOLD

    def enter(self, request: RequestState) -> None:
        if request.facts.lora is not None:
            self._users[request.facts.lora] += 1

    def leave(self, request: RequestState) -> None:
        lora = request.facts.lora
        if lora is not None:
            self._users[lora] -= 1
            if not self._users[lora]:
                del self._users[lora]


class LateOutputGate(Gate):
    """Holds a preempted request back while one of its tokens is still in flight: it would be sampled twice."""

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        if not self.context.in_flight.has_late_tokens(request):
            return None
        return Hold(Reason.IN_FLIGHT, Skip.REQUEST if queue is self.context.waiting else Skip.QUEUE)


class GrammarGate(Gate):
    """Holds a request back until its grammar is compiled."""

    _HOLD = Hold(Reason.GRAMMAR, Skip.REQUEST)

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.is_grammar_ready is not None

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        is_ready = self.context.is_grammar_ready
        return None if is_ready is None or is_ready(request.facts) else self._HOLD


class SequenceLimit(Gate):
    """At most `max_num_seqs` unfinished sequences in the running batch, and a row for each of them.

    A request with more than that would wait for ever: it passes, for admission to end it.
    """

    _HOLD = Hold(Reason.NUM_SEQS, Skip.QUEUE)

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        batch, count = self.context.batch, len(request.unfinished)
        if count > self.context.config.max_num_seqs:
            return None
        table = self.context.table
        without_row = batch.num_seqs - table.num_active_rows
        has_rows = table.num_free_rows >= without_row + count
        return None if batch.num_seqs + count <= self.context.config.max_num_seqs and has_rows else self._HOLD


class DelayGate(Gate):
    """Lets prompts gather: while something runs, requests wait until the oldest has waited longer than
    `scheduler_delay_factor` times the last prompt step took (0: off)."""

    _HOLD = Hold(Reason.DELAY, Skip.QUEUE)

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.config.scheduler_delay_factor > 0

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        if queue is not self.context.waiting or not self.context.batch.requests:
            return None
        delay_s = self.context.config.scheduler_delay_factor * self.context.in_flight.last_prompt_step_s
        return self._HOLD if plan.now_s - queue.oldest_arrival_s() <= delay_s else None


class PartialPrefillLimit(Gate):
    """Closed while `max_num_partial_prefills` prompts stay incomplete after this step."""

    _HOLD = Hold(Reason.PARTIAL_PREFILLS, Skip.QUEUE)

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.config.max_num_partial_prefills > 0

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        if queue is not self.context.waiting:
            return None
        table, rows = self.context.table, self.context.batch.running.rows
        ends = plan.ends_of(table.num_computed)
        # A resumed row that lacks only its last output token is a decode again.
        prefill_ends = np.maximum(table.num_prompt_tokens[rows], table.num_tokens[rows] - 1)
        num_partial = int(np.count_nonzero(ends[rows] < prefill_ends))
        return self._HOLD if num_partial >= self.context.config.max_num_partial_prefills else None


GATES: tuple[type[Gate], ...] = (
    LoraGate,
    LateOutputGate,
    GrammarGate,
    SequenceLimit,
    DelayGate,
    PartialPrefillLimit,
)
"""All gates, in the order in which they are asked."""


class Gates:
    """The gates that the settings call for."""

    def __init__(self, context: GateContext) -> None:
        self._gates = [gate(context) for gate in GATES if gate.is_needed(context)]
        self._counting = [gate for gate in self._gates if type(gate).enter is not Gate.enter]

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        """Return the first gate's answer that is not None."""
        for gate in self._gates:
            hold = gate.check(request, queue, plan)
            if hold is not None:
                return hold
        return None

    def enter(self, request: RequestState) -> None:
        for gate in self._counting:
            gate.enter(request)

    def leave(self, request: RequestState) -> None:
        for gate in self._counting:
            gate.leave(request)
