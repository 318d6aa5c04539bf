"""DecisionLog: why each step was planned as it was, as small records in a ring. Off unless asked for."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.core.events import Reason


@dataclass(frozen=True, slots=True)
class Admitted:
    """Entered with `num_tokens` to compute and `num_cached` found in the prefix cache; it holds `num_blocks` blocks."""

    request_id: str
    num_tokens: int
    num_cached: int
    num_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class Held:
    """Did not enter, and why. stops_queue: requests after it were not considered."""

    request_id: str
    reason: Reason
    stops_queue: bool = True


@dataclass(frozen=True, slots=True)
class Preempted:
    """Preempted so that `for_request` can continue (itself, if it was its own victim).

    mode: "recompute" or "swap".   lost_tokens: must be computed again.   freed_blocks: what that freed.
    """

    request_id: str
    for_request: str
    mode: str
    lost_tokens: int
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class Copied:
    """Copy-on-write: `source` was shared when the sequence had to write to it."""

    request_id: str
    sequence: int
    source: int
    target: int


Decision = Admitted | Held | Preempted | Copied


class DecisionLog:
    """The decisions of the last `num_steps` steps. With 0 it is off."""

    def __init__(self, num_steps: int) -> None:
        self.enabled = num_steps > 0
        self._steps: deque[tuple[int, list[Decision]]] = deque(maxlen=max(num_steps, 1))

    def open_step(self, step: int) -> None:
        self._steps.append((step, []))

    def note(self, decision: Decision) -> None:
        """Add to the open step. Callers check `enabled` first, so that a log that is off costs one comparison."""
        self._steps[-1][1].append(decision)

    def held(self, request_id: str, reason: Reason, *, stops_queue: bool) -> None:
        """The request did not enter."""
        if self.enabled:
            self.note(Held(request_id, reason, stops_queue))

    def __iter__(self) -> Iterator[tuple[int, Decision]]:
        """Yield (step, decision), in the order in which they were made."""
        return ((step, decision) for step, decisions in self._steps for decision in decisions)

    def of_request(self, request_id: str) -> list[tuple[int, Decision]]:
        """Return (step, decision) for everything that is still known of one request."""
        return [(step, decision) for step, decision in self if decision.request_id == request_id]
