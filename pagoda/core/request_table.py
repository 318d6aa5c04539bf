"""RequestTable: all hot state of the running branches, as numpy columns. LiveRequest and Branch: their cold state.

One row is one branch of a running request. Requests that wait, were preempted or are swapped out have no row; their
tokens stand in their Branch until they run again.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec
from pagoda.core.prefix_cache import HashChain
from pagoda.core.request import Request, RequestStatus

_NO_LIMIT = np.iinfo(np.int32).max


class RowState(IntEnum):
    FREE = 0
    LIVE = 1
    DEPARTED = 2  # its branch has left, but a step that names it is not home: not to be given out yet


@dataclass(slots=True, eq=False)
class Branch:
    """One output sequence. While `row` is -1 its tokens and counts stand here, else in the table.

    chain: names of its full blocks, where prefix caching is on.
    host_blocks: swapped out: per KV group, the table indices that hold KV and the host blocks it lies in.
    in_flight_steps: steps that are not home and name a row it has left (it was preempted or swapped out meanwhile).
    """

    live: "LiveRequest"
    index: int
    token_ids: np.ndarray
    row: int = -1
    num_computed: int = 0
    status: RequestStatus = RequestStatus.WAITING
    chain: HashChain | None = None
    host_blocks: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    in_flight_steps: set[int] = field(default_factory=set)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def seed(self) -> int:
        return self.live.request.seed + self.index


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that was added and has not ended.

    line_key: its place in the waiting line (policy.py).   admission: number of its last one; orders the running set.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission; has_spoken: the client was told.
    queue_s: seconds from its arrival to its first admission.
    num_prompt_positions_told: prompt logprobs that went out; a resumed request computes them again, but is silent.
    awaiting_fork: branches that share the first row until the prompt is computed.
    """

    request: Request
    line_key: tuple[float | int | str, ...]
    status: RequestStatus = RequestStatus.WAITING
    branches: list[Branch] = field(default_factory=list)
    awaiting_fork: bool = True
    admission: int = -1
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    has_spoken: bool = False
    num_prompt_positions_told: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def unfinished(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.is_finished]

    @property
    def has_tokens_in_flight(self) -> bool:
        return any(branch.in_flight_steps for branch in self.branches)


class RequestTable:
    """The columns. The scheduler alone writes them, through the verbs below or, for whole batches, by numpy.

    token_ids: int32 [rows, max_model_len], prompt then output.
    num_prompt_tokens, num_tokens, num_computed: int32 [rows].
    num_pending: int32 [rows], sampled tokens planned and not home that count as known (asynchronous scheduling).
    num_drafts: int32 [rows], drafts offered for the next step.   is_pooled: bool [rows], samples nothing.
    num_in_flight: int32 [rows], tokens planned and not home; kept only where a window group asks for it.
    length_limit: int32 [rows], num_tokens at which max_tokens or the model's length ends the row.
    block_table: per KV group, int32 [rows, max blocks]; 0 is the null block.
    num_blocks: int32 [rows], entries used in the tables of the groups that grow (they grow together).
    num_cross_blocks: int32 [rows], entries used in those that do not.
    num_registered: int32 [rows], leading blocks that the prefix cache was told of.
    attention_at: int32 [rows]: while a step ends at or below this position, the row needs nothing of the KV manager: no
        block, no copy, nothing to give back. This lets event-free steps pass without looking at tables.
    order: int64 [rows], the running order.   handle, branch, client: what outputs are labelled with.
    """

    def __init__(self, max_rows: int, max_model_len: int, max_blocks: int, groups: tuple[KVGroupSpec, ...]) -> None:
        self.max_rows = max_rows
        self.groups = groups
        self.token_ids = np.zeros((max_rows, max_model_len), np.int32)
        self.num_prompt_tokens = np.zeros(max_rows, np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.num_computed = np.zeros(max_rows, np.int32)
        self.num_pending = np.zeros(max_rows, np.int32)
        self.num_in_flight = np.zeros(max_rows, np.int32)
        self.num_drafts = np.zeros(max_rows, np.int32)
        self.is_pooled = np.zeros(max_rows, np.bool_)
        self.length_limit = np.zeros(max_rows, np.int32)
        self.attention_at = np.zeros(max_rows, np.int32)
        self.num_registered = np.zeros(max_rows, np.int32)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.num_cross_blocks = np.zeros(max_rows, np.int32)
        self.block_table = [
            np.zeros((max_rows, 0 if group.kind is KVGroupKind.CROSS else max_blocks), np.int32) for group in groups
        ]
        self.num_released = [np.zeros(max_rows, np.int32) for _ in groups]  # leading blocks given back behind a window
        self.order = np.zeros(max_rows, np.int64)
        self.handle = np.zeros(max_rows, np.int64)
        self.branch = np.zeros(max_rows, np.int32)
        self.client = np.zeros(max_rows, np.int32)
        self.state = np.zeros(max_rows, np.int8)
        self.branch_of: list[Branch | None] = [None] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._departed: list[tuple[int, int]] = []  # (row, step after which it is free)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def has_departed(self) -> bool:
        return bool(self._departed)

    def admit(self, branch: Branch, num_computed: int) -> int:
        """Give `branch` a row with its tokens; its tables are still empty."""
        row = self._free_rows.pop()
        live, request = branch.live, branch.live.request
        count = len(branch.token_ids)
        self.token_ids[row, :count] = branch.token_ids
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_tokens[row] = count
        self.num_computed[row] = num_computed
        self.num_pending[row] = 0
        self.num_in_flight[row] = 0
        self.num_drafts[row] = 0
        self.is_pooled[row] = request.pooling is not None
        self.length_limit[row] = self.limit_of(request)
        self.attention_at[row] = -1
        self.num_registered[row] = 0
        self.num_blocks[row] = 0
        self.num_cross_blocks[row] = 0
        for released in self.num_released:
            released[row] = 0
        self.order[row] = (live.admission << 16) | branch.index
        self.handle[row] = request.handle
        self.branch[row] = branch.index
        self.client[row] = request.client_index
        self.state[row] = RowState.LIVE
        self.branch_of[row] = branch
        branch.row = row
        return row

    def limit_of(self, request: Request) -> int:
        """num_tokens at which the request's branches end."""
        if request.sampling is None:
            return _NO_LIMIT
        longest = self.token_ids.shape[1]
        max_tokens = request.sampling.max_tokens
        return longest if max_tokens is None else min(request.num_prompt_tokens + max_tokens, longest)

    def fork(self, source: int, branch: Branch) -> int:
        """Give `branch` a row that equals `source` but for its label. Block references are left to the KV manager."""
        row = self._free_rows.pop()
        count = int(self.num_tokens[source])
        self.token_ids[row, :count] = self.token_ids[source, :count]
        for column in self._plain_columns():
            column[row] = column[source]
        self.num_in_flight[row] = 0
        for table in self.block_table:
            table[row] = table[source]
        self.order[row] = (branch.live.admission << 16) | branch.index
        self.branch[row] = branch.index
        self.branch_of[row] = branch
        branch.row = row
        return row

    def widen_cross(self, group: int, num_blocks: int) -> None:
        """Make room for `num_blocks` entries in a cross-attention table (encoders may outrun the model length)."""
        missing = num_blocks - self.block_table[group].shape[1]
        if missing > 0:
            self.block_table[group] = np.pad(self.block_table[group], ((0, 0), (0, missing)))

    def _plain_columns(self) -> tuple[np.ndarray, ...]:
        """What a fork simply inherits."""
        counts = (self.num_prompt_tokens, self.num_tokens, self.num_computed, self.num_pending, self.length_limit)
        blocks = (self.attention_at, self.num_registered, self.num_blocks, self.num_cross_blocks, *self.num_released)
        return (*counts, *blocks, self.num_drafts, self.handle, self.client, self.state, self.is_pooled)

    def release(self, branch: Branch, last_step_in_flight: int) -> None:
        """Take the row from `branch`, whose tokens and computed count go back to it.

        The row is given out again when step `last_step_in_flight` is home (0: at once), so that a late result
        still finds its owner.
        """
        row = branch.row
        branch.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        branch.num_computed = int(self.num_computed[row])
        branch.row = -1
        if last_step_in_flight:
            self.state[row] = RowState.DEPARTED
            self._departed.append((row, last_step_in_flight))
        else:
            self._free(row)

    def disown(self, row: int) -> None:
        """Late results of a departed row are nobody's any more: they will be dropped."""
        self.branch_of[row] = None

    def step_is_home(self, step: int) -> None:
        """Rows that only steps up to `step` name can be given out again."""
        kept = []
        for row, last_step in self._departed:
            if last_step <= step:
                self._free(row)
            else:
                kept.append((row, last_step))
        self._departed = kept

    def _free(self, row: int) -> None:
        self.state[row] = RowState.FREE
        self.branch_of[row] = None
        self._free_rows.append(row)

    def live_rows(self) -> np.ndarray:
        """int64 [n]: rows of running branches, in running order."""
        rows = np.flatnonzero(self.state == RowState.LIVE)
        return rows[np.argsort(self.order[rows], kind="stable")]

    def tables(self, row: int) -> tuple[np.ndarray, ...]:
        """A copy of the row's block table per group, used entries only."""
        return tuple(
            table[row, : self.num_cross_blocks[row] if group.kind is KVGroupKind.CROSS else self.num_blocks[row]].copy()
            for group, table in zip(self.groups, self.block_table, strict=True)
        )

    def row(self, row: int) -> dict[str, object]:
        """One row for human eyes."""
        owner = self.branch_of[row]
        return {
            "request_id": owner.live.request_id if owner else None,
            "branch": int(self.branch[row]),
            "state": RowState(int(self.state[row])).name,
            "tokens": self.token_ids[row, : self.num_tokens[row]].tolist(),
            "num_prompt_tokens": int(self.num_prompt_tokens[row]),
            "num_computed": int(self.num_computed[row]),
            "num_pending": int(self.num_pending[row]),
            "blocks": [table.tolist() for table in self.tables(row)],
        }

    def check(self) -> None:
        """Each row has one owner or none, and counts that can be true. Raises InvariantBroken."""
        for row, owner in enumerate(self.branch_of):
            if self.state[row] == RowState.LIVE and (owner is None or owner.row != row):
                raise InvariantBroken(f"row {row} is live but its branch stands elsewhere")
        rows = np.flatnonzero(self.state == RowState.LIVE)
        if len(self._free_rows) + len(self._departed) + len(rows) != self.max_rows:
            raise InvariantBroken("a row is lost or counted twice")
