"""RequestState and Sequence: what changes while a request is served."""

from dataclasses import dataclass, field

import numpy as np

from pagoda.core.beam_search import BeamSearch
from pagoda.core.request import Request, RequestStatus


@dataclass(slots=True, eq=False)
class Sequence:
    """One output sequence of a request.

    row: its row in RequestTable, -1 while it has none.
    token_ids, num_computed: current while row is -1; otherwise the table's columns are. RequestTable writes all three.
    end: how it ended; None while it has not. Where it is until then is its request's status. Written by lifecycle.py.
    """

    request: "RequestState"
    index: int
    token_ids: np.ndarray
    row: int = -1
    num_computed: int = 0
    end: RequestStatus | None = None

    @property
    def is_finished(self) -> bool:
        return self.end is not None

    @property
    def seed(self) -> int:
        return self.request.spec.seed + self.index


SortKey = tuple[float | int | str, ...]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that was added and has not ended.

    spec: what was asked for.
    sort_key: its place in the queues, set by the policy.   admission: number of its last admission, which orders the
        running batch; -1 before the first.
    awaiting_fork: its sequences share the first one's row until the prompt is computed.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission.   queue_s: seconds from its
        arrival to its first admission.   has_output: its client was sent a first token.
    num_prompt_logprobs_sent: prompt positions whose logprobs were sent; a resumed request computes them again.
    num_draft_tokens, num_accepted_tokens: drafts verified for its sequences, and those that were right.
    beams: of a beam search whose prompt is computed; else None. Written by extend_beams.py, dropped by lifecycle.py.
    """

    spec: Request
    sort_key: SortKey
    status: RequestStatus = RequestStatus.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    awaiting_fork: bool = True
    admission: int = -1
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    has_output: bool = False
    num_prompt_logprobs_sent: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    beams: BeamSearch | None = None

    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.spec.request_id

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.end is None]

    @property
    def followers(self) -> list[Sequence]:
        """Sequences that will share the first one's prompt blocks when they return with it; none before the fork."""
        return [] if self.awaiting_fork else self.unfinished[1:]

    @property
    def rows(self) -> list[int]:
        """Rows of its sequences that have one."""
        return [sequence.row for sequence in self.sequences if sequence.row >= 0]
