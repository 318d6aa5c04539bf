"""StepPlan: one step while it is being planned. Lineup: the running set as arrays, kept from step to step."""

from dataclasses import dataclass, field

import numpy as np

from pagoda.core.request_table import LiveRequest, RequestTable
from pagoda.core.scheduler_output import NO_INTS, AdmitKind, EncoderRun


@dataclass(frozen=True, slots=True, eq=False)
class Lineup:
    """Arrays over the running rows, in running order. Made anew when the running set changes, never written to.

    rows, numbers (0..n-1), ones: int32 [n].   handles: int64 [n].   branches, clients: int32 [n].
    client: the one client of all rows, None where there are several.   num_common_prefix_blocks: per KV group.
    """

    rows: np.ndarray
    numbers: np.ndarray
    ones: np.ndarray
    handles: np.ndarray
    branches: np.ndarray
    clients: np.ndarray
    client: int | None
    num_common_prefix_blocks: tuple[int, ...]

    @classmethod
    def of(cls, table: RequestTable, ref_count: np.ndarray) -> "Lineup":
        rows = table.live_rows().astype(np.int32)
        count = len(rows)
        clients = table.client[rows]
        one_client = count > 0 and bool((clients == clients[0]).all())
        return cls(
            rows,
            np.arange(count, dtype=np.int32),
            np.ones(count, np.int32),
            table.handle[rows],
            table.branch[rows],
            clients,
            int(clients[0]) if one_client else None,
            tuple(_num_common_blocks(blocks, rows, table, ref_count) for blocks in table.block_table),
        )


def _num_common_blocks(blocks: np.ndarray, rows: np.ndarray, table: RequestTable, ref_count: np.ndarray) -> int:
    """Leading full blocks that all of `rows` (two at least) hold in common: exactly those with a reference of each."""
    if len(rows) < 2:
        return 0
    first = blocks[rows[0], : table.num_blocks[rows[0]]]
    shared_by_all = (ref_count[first] == len(rows)) & (first != 0)
    if not len(first) or not shared_by_all[0]:
        return 0
    count = len(first) if shared_by_all.all() else int(np.argmin(shared_by_all))
    return int((blocks[rows, :count] == first[:count]).all(axis=0).sum())


@dataclass(slots=True, eq=False)
class Entry:
    """A row that comes to the workers in this step."""

    row: int
    kind: AdmitKind
    num_computed: int


@dataclass(slots=True, eq=False)
class StepPlan:
    """What has been decided so far.

    budget, encoder_budget: tokens left.   prompt_cap: most tokens one row gets, 0 for no cap.
    bulk_*: rows placed by numpy.   placed: row -> (start, num_new), placed one by one.
    """

    step: int
    budget: int
    encoder_budget: int
    prompt_cap: int
    now_s: float
    bulk_rows: np.ndarray = field(default_factory=lambda: NO_INTS)
    bulk_start: np.ndarray = field(default_factory=lambda: NO_INTS)
    bulk_new: np.ndarray = field(default_factory=lambda: NO_INTS)
    placed: dict[int, tuple[int, int]] = field(default_factory=dict)
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    encoder_runs: dict[int, list[EncoderRun]] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    preempted: list[LiveRequest] = field(default_factory=list)
    num_swapped: int = 0
    num_prompts: int = 0  # rows placed that compute more than their last token
    steady: bool = False
    _granted: int = field(init=False)

    def __post_init__(self) -> None:
        self._granted = self.budget

    @property
    def num_scheduled(self) -> int:
        """Tokens of all rows placed so far."""
        return self._granted - self.budget

    @property
    def is_empty(self) -> bool:
        return not self.placed and len(self.bulk_rows) == 0

    def place(self, row: int, start: int, num_new: int) -> None:
        self.placed[row] = (start, num_new)
        self.budget -= num_new

    def take_out(self, row: int) -> None:
        """The row does not run in this step after all; what it had taken of the budget is returned."""
        self.steady = False
        if row in self.placed:
            self.budget += self.placed.pop(row)[1]
        elif len(self.bulk_rows):
            keep = self.bulk_rows != row
            self.budget += int(self.bulk_new[~keep].sum())
            self.bulk_rows, self.bulk_start, self.bulk_new = (
                self.bulk_rows[keep],
                self.bulk_start[keep],
                self.bulk_new[keep],
            )
        self.drafts.pop(row, None)
        self.entries.pop(row, None)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """rows, start, num_new: int32 [num_rows], running rows first."""
        if not self.placed:
            return self.bulk_rows, self.bulk_start, self.bulk_new
        rows = np.fromiter(self.placed, np.int32, len(self.placed))
        pairs = np.array(list(self.placed.values()), np.int32)
        if not len(self.bulk_rows):
            return rows, pairs[:, 0], pairs[:, 1]
        return (
            np.concatenate((self.bulk_rows, rows)),
            np.concatenate((self.bulk_start, pairs[:, 0])),
            np.concatenate((self.bulk_new, pairs[:, 1])),
        )
