"""What the twin remembers of a request and of each of its branches."""

from dataclasses import dataclass, field

from pagoda.core.request import Request


@dataclass
class Branch:
    """One sequence. `tables`: per KV group, block numbers, 0 where a block was given back."""

    number: int
    tokens: list[int]
    num_prompt: int
    tables: list[list[int]]
    computed: int = 0
    in_flight: int = 0  # tokens of `computed` whose step is not home
    placeholders: int = 0  # asynchronous: sampled tokens planned, not home
    hashed: list[int] = field(default_factory=list)  # per group: leading blocks whose content is recorded
    drafts: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass
class Live:
    """One request that has not ended."""

    request: Request
    order: int  # of arrival at the scheduler
    branches: list[Branch]
    status: str = "waiting"  # waiting, running, swapped, preempted
    arrived_s: float = 0.0
    epoch: int = 0  # rises with each recompute preemption; steps planned before it are stale
    drop_before: int = 0  # steps of epochs before this give nothing (reset)
    stale_steps: int = 0  # planned before the last preemption, deliverable, not home
    forked: bool = False
    encoder_items: set[int] = field(default_factory=set)  # places whose encoder output it holds

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def alive(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.finished]

    @property
    def urgency(self) -> tuple[int, float, str]:
        return (self.request.priority, self.request.arrival_time_s, self.id)


@dataclass
class Planned:
    """One branch's share of a step."""

    live: Live
    branch: Branch
    start: int
    new: int
    samples: bool
    drafts: list[int]
    epoch: int


@dataclass
class Step:
    number: int
    planned: list[Planned]
    has_prompt: bool
