"""DraftModelDrafter: a smaller model with the same vocabulary.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; here a draft is right only if it
equals the token that the large model draws.
"""

from collections.abc import Sequence

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.drafters.drafter import GRADE_OF_MODEL, MAX_DRAFT_STEP_TOKENS, NO_DRAFT, Draft
from pagoda.worker.drafters.rollout import DraftForward, roll_out
from pagoda.worker.sampler import Sampler
from pagoda.worker.table_mirror import TableMirror


class DraftModelDrafter:
    """Keeps a KV cache of its own, which is filled for a row when the row is first drafted for.

    If no block is free, the row that was drafted for least recently loses its blocks, and is computed again later. A
    step catches up with at most MAX_DRAFT_STEP_TOKENS tokens of all rows; those that lack more get no draft yet.
    """

    runs_model = True

    def __init__(self, draft: DraftForward, sampler: Sampler, num_blocks: int) -> None:
        """draft: with a table of its own, which has the target's rows.   num_blocks: of its KV cache."""
        self._draft = draft
        self._sampler = sampler
        table = draft.table
        max_rows = len(table.num_tokens)
        self._num_computed = np.zeros(max_rows, np.int32)  # tokens of table.token_ids whose KV is in the cache
        self._num_blocks = np.zeros(max_rows, np.int32)  # per group
        self._free = list(range(num_blocks, 0, -1))
        self._used_at = np.zeros(max_rows, np.int64)
        self._now = 0

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Free the blocks of rows that end or begin."""
        for row in output.released.tolist():
            self._forget(row)
        for init in output.admitted:
            self._forget(init.row)
        for fork in output.forks:
            self._forget(fork.dst)

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        self._now += 1
        self._used_at[rows] = self._now
        drafts: list[Draft] = [NO_DRAFT] * len(rows)
        # The KV of the last drawn token is not needed: nothing is drawn after it.
        ends = table.num_tokens[rows] + most - 1
        fits = [self._make_room(row, end) for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        some = np.flatnonzero(fits)
        some = some[self._catch_up(table, rows[some])]
        if not some.size:
            return drafts
        at = rows[some]
        start = self._num_computed[at].copy()
        tokens = roll_out(self._draft, table, self._sampler, at, start, most[some])
        self._num_computed[at] = ends[some]
        for i, drawn in zip(some.tolist(), tokens, strict=True):
            drafts[i] = Draft(drawn, GRADE_OF_MODEL)
        return drafts

    def _catch_up(self, table: TableMirror, rows: np.ndarray) -> np.ndarray:
        """Share a step's tokens among the rows, those first that lack least; compute a chunk of one that lacks more.

        Return which rows can be drafted for (bool [num_rows]): what they lack is computed with their first draw.
        """
        for row in rows.tolist():
            self._copy_tokens(table, row)
        lacking = table.num_tokens[rows] - self._num_computed[rows]
        is_ready = np.zeros(len(rows), np.bool_)
        budget = MAX_DRAFT_STEP_TOKENS
        for i in np.argsort(lacking, kind="stable").tolist():
            if lacking[i] > budget:
                if budget:
                    start, count = self._num_computed[rows[i : i + 1]], np.array([budget], np.int32)
                    self._draft.compute(rows[i : i + 1], start, count)
                    self._num_computed[rows[i]] += budget
                break
            is_ready[i] = True
            budget -= int(lacking[i])
        return is_ready

    def _copy_tokens(self, table: TableMirror, row: int) -> None:
        """Take over the row's known tokens; forget drafts that were wrong. Its last token is never computed yet."""
        own = self._draft.table.token_ids[row]
        known = int(table.num_tokens[row])
        tokens = table.token_ids[row, :known]
        computed = min(int(self._num_computed[row]), known - 1)
        differs = np.flatnonzero(own[:computed] != tokens[:computed])
        self._num_computed[row] = differs[0] if differs.size else computed
        own[:known] = tokens

    def _make_room(self, row: int, end: int) -> bool:
        """Give the row blocks for positions below `end`. Return False if there are not enough."""
        tables, block_size = self._draft.table.block_tables, self._draft.table.block_size
        held, needed = int(self._num_blocks[row]), -(-end // block_size)
        while len(self._free) < (needed - held) * len(tables):
            idle = np.flatnonzero((self._num_blocks > 0) & (self._used_at < self._now))
            if not idle.size:
                return False
            self._forget(int(idle[np.argmin(self._used_at[idle])]))
        for index in range(held, needed):
            for table in tables:
                table[row, index] = self._free.pop()
        self._num_blocks[row] = max(held, needed)
        return True

    def _forget(self, row: int) -> None:
        for table in self._draft.table.block_tables:
            self._free += table[row, : self._num_blocks[row]].tolist()
        self._num_blocks[row] = self._num_computed[row] = 0
