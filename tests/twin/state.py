"""What the twin remembers of a request and of each of its branches."""

from dataclasses import dataclass, field

from pagoda.core.request import Request

Key = tuple[float | int | str, ...]


@dataclass(eq=False)
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
    on_host: list[list[int]] | None = None  # the tables, in host blocks, while the request is swapped out
    mid_prefill: bool = False  # its last chunk did not reach the end of what is known
    started: bool = False  # has blocks, and may be given tokens
    finished: bool = False

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(eq=False)
class Live:
    """One request that has not ended."""

    request: Request
    place: Key  # in the lines
    branches: list[Branch]
    status: str = "waiting"  # waiting, running, swapped, preempted, gone
    epoch: int = 0  # rises when it leaves the running set
    stale_steps: int = 0  # steps that sample for it, planned before it left, not home
    drop_before: int = 0  # results of epochs before this are nobody's (reset)
    forked: bool = False
    encoder_items: set[int] = field(default_factory=set)  # places whose encoder output it holds

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def alive(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.finished]

    @property
    def seats(self) -> int:
        return len(self.alive) if self.forked else self.request.num_seqs


@dataclass(eq=False)
class Planned:
    """One branch's share of a step."""

    live: Live
    branch: Branch
    start: int
    new: int
    drafts: list[int]
    epoch: int
    samples: bool = False
    of_prompts: int = 0  # tokens taken of what prompts may have


@dataclass(eq=False)
class Step:
    """What was planned together. `sampling`: every branch that gets a token, fresh forks included."""

    number: int
    planned: list[Planned]
    sampling: list[Planned]
    has_prompt: bool

    @property
    def requests(self) -> list[Live]:
        return list(dict.fromkeys(entry.live for entry in self.planned))

    @property
    def epochs(self) -> dict[str, int]:
        return {entry.live.id: entry.epoch for entry in self.planned}
