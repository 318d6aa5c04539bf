"""Gates: who may enter the running batch. To add one, write a class and add it to GATES."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from pagoda.core.decision_log import DecisionLog, Reason
from pagoda.core.grammar import CompiledGrammars
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.queues import QueueScan, RequestQueue
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.step_plan import StepPlan


class Skip(Enum):
    """What a closed gate holds back in this step."""

    REQUEST = "this request"
    KEY = "all requests with its key (queues.key_of: the LoRA adapter)"
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
    grammars: None if no request has a grammar.
    """

    config: SchedulerOptions
    table: RequestTable
    batch: RunningBatch
    in_flight: StepsInFlight
    waiting: RequestQueue
    grammars: CompiledGrammars | None = None


class Gate:
    """A condition for entering. A request that a gate holds back keeps its place in the queue.

    A gate that counts overrides `enter` and `leave`.
    """

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
        """The request enters the running batch."""

    def leave(self, request: RequestState) -> None:
        """The request leaves the running batch."""


class LoraGate(Gate):
    """At most `max_loras` distinct adapters in the running batch (0: any number)."""

    _HOLD = Hold(Reason.LORA, Skip.KEY)

    def __init__(self, context: GateContext) -> None:
        super().__init__(context)
        self._users: Counter[tuple[str, ...]] = Counter()  # by LoraRef.identity

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.config.max_loras > 0

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        lora = request.facts.lora
        if lora is None or lora.identity in self._users or len(self._users) < self.context.config.max_loras:
            return None
        return self._HOLD

    def enter(self, request: RequestState) -> None:
        if request.facts.lora is not None:
            self._users[request.facts.lora.identity] += 1

    def leave(self, request: RequestState) -> None:
        lora = request.facts.lora
        if lora is not None:
            self._users[lora.identity] -= 1
            if not self._users[lora.identity]:
                del self._users[lora.identity]


class LateOutputGate(Gate):
    """Holds a preempted request back while one of its tokens is still in flight: it would be sampled twice."""

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        if not self.context.in_flight.has_late_tokens(request):
            return None
        return Hold(Reason.IN_FLIGHT, Skip.REQUEST if queue is self.context.waiting else Skip.QUEUE)


class GrammarGate(Gate):
    """Holds a request back until its grammar is compiled; keeps the grammars of running requests compiled."""

    _HOLD = Hold(Reason.GRAMMAR, Skip.REQUEST)

    def __init__(self, context: GateContext) -> None:
        super().__init__(context)
        assert context.grammars is not None
        self._grammars = context.grammars

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.grammars is not None

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        grammar = request.facts.grammar
        return None if grammar is None or self._grammars.is_ready(grammar) else self._HOLD

    def enter(self, request: RequestState) -> None:
        if (grammar := request.facts.grammar) is not None:
            self._grammars.pin(grammar)

    def leave(self, request: RequestState) -> None:
        if (grammar := request.facts.grammar) is not None:
            self._grammars.unpin(grammar)


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
    """Closed while `max_num_partial_prefills` prompts stay incomplete after this step.

    The running rows are counted once per step, each request that enters after that when the next one is checked.
    """

    _HOLD = Hold(Reason.PARTIAL_PREFILLS, Skip.QUEUE)

    def __init__(self, context: GateContext) -> None:
        super().__init__(context)
        self._plan: StepPlan | None = None  # the step that is counted
        self._num_partial = 0
        self._entered: list[RequestState] = []

    @staticmethod
    def is_needed(context: GateContext) -> bool:
        return context.config.max_num_partial_prefills > 0

    def check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        if queue is not self.context.waiting:
            return None
        if self._plan is not plan:
            rows = self.context.batch.running.rows
            ends = plan.ends_of(self.context.table.num_computed)[rows]
            self._plan, self._num_partial = plan, self._count(rows, ends)
        elif self._entered:
            rows = np.array([row for entered in self._entered for row in entered.rows])
            self._num_partial += self._count(rows, np.array([sum(plan.placed[row]) for row in rows.tolist()]))
        self._entered.clear()
        return self._HOLD if self._num_partial >= self.context.config.max_num_partial_prefills else None

    def _count(self, rows: np.ndarray, ends: np.ndarray) -> int:
        """Return how many prompts are incomplete when `rows` are computed up to `ends`."""
        table = self.context.table
        # A resumed row that lacks only its last output token is a decode again.
        return int(np.count_nonzero(ends < np.maximum(table.num_prompt_tokens[rows], table.num_tokens[rows] - 1)))

    def enter(self, request: RequestState) -> None:
        self._entered.append(request)

    def leave(self, request: RequestState) -> None:
        self._plan = None


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

    def __init__(self, context: GateContext, log: DecisionLog) -> None:
        self._gates = [gate(context) for gate in GATES if gate.is_needed(context)]
        self._log = log

    def walk(
        self,
        queue: RequestQueue,
        plan: StepPlan,
        offer: Callable[[RequestState, StepPlan], Reason | None],
        make_way: Callable[[RequestState, StepPlan, Reason], bool] = lambda request, plan, reason: False,
    ) -> bool:
        """Offer the requests of `queue` in order while budget is left. Return False if one of them has to wait.

        Strict queue order: only requests that a gate holds back alone, or with their key, are passed over.
        offer: let the request in, or end it, and return None; or return why it waits.   make_way: called when a
        request waits; return True to look at the queue again.
        """
        scan = QueueScan(queue)
        is_open = True
        while is_open and plan.budget > 0 and (request := scan.peek()) is not None:
            hold = self._check(request, queue, plan)
            if hold is not None and hold.skip is not Skip.QUEUE:
                self._log.held(request.request_id, hold.reason, stops_queue=False)
                scan.skip_key(request) if hold.skip is Skip.KEY else scan.skip(request)
                continue
            reason = hold.reason if hold is not None else offer(request, plan)
            if reason is not None and not make_way(request, plan, reason):
                self._log.held(request.request_id, reason, stops_queue=True)
                is_open = False
        scan.close()
        return is_open and plan.budget > 0

    def _check(self, request: RequestState, queue: RequestQueue, plan: StepPlan) -> Hold | None:
        """Return the first gate's answer that is not None."""
        for gate in self._gates:
            hold = gate.check(request, queue, plan)
            if hold is not None:
                return hold
        return None

    def enter(self, request: RequestState) -> None:
        for gate in self._gates:
            gate.enter(request)

    def leave(self, request: RequestState) -> None:
        for gate in self._gates:
            gate.leave(request)
