"""Gates: who may enter the batch, asked at admission only. A request that a gate holds back keeps its place in line."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pagoda.core.decision_log import Reason
from pagoda.core.request import LoraRef, Request
from pagoda.core.request_table import LiveRequest


class Gate(Protocol):
    """Holds single requests back while others pass."""

    def refusal(self, live: LiveRequest) -> Reason | None:
        """Why `live` may not enter in this step, or None."""
        ...


class LoraGate:
    """At most `max_loras` distinct adapters in the running set (0: any number)."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._users: Counter[LoraRef] = Counter()

    def refusal(self, live: LiveRequest) -> Reason | None:
        lora = live.request.lora
        if not self.max_loras or lora is None or lora in self._users or len(self._users) < self.max_loras:
            return None
        return Reason.LORA

    def enter(self, live: LiveRequest) -> None:
        if live.request.lora is not None:
            self._users[live.request.lora] += 1

    def leave(self, live: LiveRequest) -> None:
        lora = live.request.lora
        if lora is not None:
            self._users[lora] -= 1
            if not self._users[lora]:
                del self._users[lora]


class GrammarGate:
    """Holds a request back until its grammar is compiled; `is_ready` answers for a request."""

    def __init__(self, is_ready: Callable[[Request], bool]) -> None:
        self._is_ready = is_ready

    def refusal(self, live: LiveRequest) -> Reason | None:
        return None if self._is_ready(live.request) else Reason.GRAMMAR


class LateOutputGate:
    """Holds a preempted request back while a token of it is still in flight: it would be sampled twice."""

    def refusal(self, live: LiveRequest) -> Reason | None:
        return Reason.IN_FLIGHT if live.has_tokens_in_flight else None


class DelayGate:
    """Lets prompts gather: while something runs, admission waits until the oldest request has waited longer than
    `factor` times the last prompt step took (0: never waits)."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.last_prompt_step_s = 0.0

    def is_closed(self, oldest_arrival_s: float, now_s: float) -> bool:
        return self.factor > 0 and now_s - oldest_arrival_s <= self.factor * self.last_prompt_step_s
