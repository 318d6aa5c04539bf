"""DecisionLog: why each step was planned as it was, as small records in a ring. Filled only when asked for."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum


class Reason(Enum):
    """Why a waiting request did not enter in a step."""

    BUDGET = "token budget spent"
    SEATS = "no free seat"
    BLOCKS = "not enough free blocks"
    WATERMARK = "the watermark would be broken"
    NEVER = "larger than the pool can ever hold"
    LORA = "too many adapters in the batch"
    ENCODER = "encoder budget or cache spent"
    GRAMMAR = "grammar not compiled yet"
    DELAY = "waiting for more prompts to gather"
    PARTIAL_PREFILLS = "too many prompts are mid-prefill"
    IN_FLIGHT = "a token of it is still in flight"
    PREEMPTED = "nobody enters in a step that preempts"
    SWAPPED = "swapped requests come first"


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
    """Did not enter, and why. `stops_line`: nobody behind it was asked."""

    request_id: str
    reason: Reason
    stops_line: bool = True


@dataclass(frozen=True, slots=True)
class Preempted:
    """Thrown out for `for_request` (itself, when it was its own victim).

    mode: "recompute" or "swap".   lost_tokens: must be computed again.   freed_blocks: what it gave.
    """

    request_id: str
    for_request: str
    mode: str
    lost_tokens: int
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class Copied:
    """Copy-on-write: `source` was shared when `request_id` came to write into it."""

    request_id: str
    branch: int
    source: int
    target: int


Decision = Admitted | Held | Preempted | Copied


@dataclass(slots=True)
class StepDecisions:
    """All decisions of one step, in the order they were made."""

    step: int
    decisions: list[Decision] = field(default_factory=list)


class DecisionLog:
    """The last `num_steps` steps' decisions. With 0 it is switched off, and callers build no records."""

    def __init__(self, num_steps: int) -> None:
        self.enabled = num_steps > 0
        self._steps: deque[StepDecisions] = deque(maxlen=max(num_steps, 1))

    def open_step(self, step: int) -> None:
        if self.enabled:
            self._steps.append(StepDecisions(step))

    def note(self, decision: Decision) -> None:
        """Add to the open step. Callers ask `enabled` first, so that a switched-off log costs one look."""
        self._steps[-1].decisions.append(decision)

    def __iter__(self):
        """Oldest step first."""
        return iter(self._steps if self.enabled else ())

    def of_request(self, request_id: str) -> list[tuple[int, Decision]]:
        """(step, decision) of everything that is still known of one request."""
        return [
            (step.step, decision) for step in self for decision in step.decisions if decision.request_id == request_id
        ]
