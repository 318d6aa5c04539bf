"""What the twin remembers of a request and of each of its sequences."""

from dataclasses import dataclass, field

from pagoda.core.request import Reason, Request
from tests.twin.beams import TwinSearch

Key = tuple[float | int | str, ...]


@dataclass(eq=False)
class TwinSequence:
    """One sequence. `tables`: per KV group, block numbers, 0 where a block was freed."""

    number: int
    tokens: list[int]
    num_prompt: int
    tables: list[list[int]]
    computed: int = 0
    in_flight: int = 0  # tokens of `computed` whose step is not back
    placeholders: int = 0  # asynchronous: sampled tokens planned, not back
    hashed: list[int] = field(default_factory=list)  # per group: leading blocks whose content is recorded
    drafts: list[int] = field(default_factory=list)
    snapshots: set[int] = field(default_factory=set)  # blocks before which its state is kept because of its prompt
    on_host: list[list[int]] | None = None  # the tables, in host blocks, while the request is swapped out
    mid_prefill: bool = False  # its last chunk did not reach the end of what is known
    started: bool = False  # has blocks, and may be given tokens
    finished: bool = False
    limit: Reason | None = None  # why it last computed less than it could, since it was started

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(eq=False)
class TwinRequest:
    """One request that has not ended."""

    request: Request
    place: Key  # sort key in the queues
    sequences: list[TwinSequence]
    status: str = "waiting"  # waiting, running, swapped, preempted, gone
    epoch: int = 0  # rises when it leaves the running set
    adapter_skips: int = 0
    stale_steps: int = 0  # steps that sample for it, planned before it left, not back
    drop_before: int = 0  # results of epochs before this are dropped (reset)
    forked: bool = False
    admission: int = 0  # number of its last one
    encoder_items: set[int] = field(default_factory=set)  # places whose encoder output it holds
    held_for: Reason | None = None  # why it waits, as was last written
    is_considered: bool = False  # in the step that is planned, and does not enter
    is_aside: bool = False  # waits for something of its own, and is not considered before that is there
    has_output: bool = False
    search: TwinSearch | None = None  # of its beams, once their first tokens are chosen from

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def alive(self) -> list[TwinSequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def started(self) -> list[TwinSequence]:
        return [sequence for sequence in self.alive if sequence.started]

    @property
    def num_seqs(self) -> int:
        return len(self.alive)


@dataclass(eq=False)
class Planned:
    """One sequence's share of a step."""

    state: TwinRequest
    sequence: TwinSequence
    start: int
    new: int
    drafts: list[int]
    epoch: int
    samples: bool = False
    decodes: bool = False  # it was running, and lacked its last token only
    mid_prefill: bool = False  # it was running, or returns from the host, and lacked more than that
    of_prompts: int = 0  # tokens taken of what prompts may have
    recorded: list[int] = field(default_factory=list)  # blocks that can be found because of it
    reads: set[tuple[int, int]] = field(default_factory=set)  # stamps of blocks
    writes: set[tuple[int, int]] = field(default_factory=set)


@dataclass(eq=False)
class Step:
    """What was planned together. `sampling`: every sequence that gets a token, fresh forks included.

    pooling: sequences of requests to pool whose prompts end here.
    """

    number: int
    planned: list[Planned]
    sampling: list[Planned]
    has_prompt: bool
    pooling: list[Planned] = field(default_factory=list)
    copied: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)  # source, target
    joined: list[Planned] = field(default_factory=list)  # share blocks of a resumed sibling, and compute nothing yet
    encoded: dict[str, list[int]] = field(default_factory=dict)  # request id -> places of its items

    @property
    def requests(self) -> list[TwinRequest]:
        return list(dict.fromkeys(entry.state for entry in self.planned))

    @property
    def epochs(self) -> dict[str, int]:
        return {entry.state.id: entry.epoch for entry in self.planned}
