"""ForcedDrafter: tokens that a grammar forces, such as the names of properties, enter as drafts.

They cost one forward together instead of one each. Nothing else follows from being forced: they are verified like any
draft, against masks that allow only them.
"""

from collections.abc import Sequence

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.drafters.drafter import NO_DRAFT, NUM_GRADES, Draft, Drafter
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.table_mirror import TableMirror


class ForcedDrafter:
    """Drafts what the grammar forces, and for rows where it forces nothing, what another drafter proposes."""

    def __init__(self, grammars: GrammarRows | None, other: Drafter | None = None) -> None:
        """grammars: of the worker's rows; None if none can have one.   other: None to draft nothing else."""
        self._grammars = grammars
        self._other = other
        self.runs_model = other is not None and other.runs_model

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        if self._other is not None:
            self._other.apply(output, table)

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        if self._other is not None and (self._grammars is None or not self._grammars.any):
            return self._other.propose(table, rows, most)
        drafts = [self._forced(table, row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]
        free = np.array([not len(draft.tokens) for draft in drafts], np.bool_)
        if self._other is not None and free.any():
            others = self._other.propose(table, rows[free], most[free])
            for i, draft in zip(np.flatnonzero(free).tolist(), others, strict=True):
                drafts[i] = draft
        return drafts

    def _forced(self, table: TableMirror, row: int, most: int) -> Draft:
        tokens = self._grammars.forced(table, row) if self._grammars is not None else ()
        return Draft(np.array(tokens[:most], np.int32), NUM_GRADES - 1) if tokens else NO_DRAFT
