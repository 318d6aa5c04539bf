"""NgramDrafter (prompt lookup): copy what followed the last occurrence of the row's last few tokens.

Saxena, "Prompt lookup decoding", 2023.
"""

from collections.abc import Sequence

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.drafters.drafter import NO_DRAFT, Draft, grade_of_match
from pagoda.worker.drafters.matching import continue_from, longest_suffix_matches
from pagoda.worker.table_mirror import TableMirror


class NgramDrafter:
    """Searches the row's own prompt and output. Keeps no state."""

    runs_model = False

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        """lookup_min, lookup_max: tokens that must match, and most tokens that are compared."""
        self._min = lookup_min
        self._max = lookup_max

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Nothing to note."""

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        return [self._draft(table, row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _draft(self, table: TableMirror, row: int, most: int) -> Draft:
        tokens = table.token_ids[row, : table.num_tokens[row]]
        ends, length = longest_suffix_matches(tokens, self._max)
        if length < self._min:
            return NO_DRAFT
        return Draft(continue_from(tokens, int(ends[-1]), most), grade_of_match(length))
