"""Drafter: proposes the next tokens of rows. A wrong proposal costs time; it never changes a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.table_mirror import TableMirror

NUM_GRADES = 6
"""Drafts are graded 0 .. 5 by how sure the drafter is. Acceptance is counted per grade, so grades need no scale."""

MAX_DRAFT_STEP_TOKENS = 256
"""Most tokens per forward pass of a draft model, and most that it reads per step of what it has not read yet."""

GRADE_OF_MODEL = 3
"""Of drafts that a model draws."""

_GRADE_BOUNDS = (2, 3, 5, 8, 15)  # longest match of each grade but the last


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The proposed continuation of one row.

    tokens: int32 [k], may be empty.   grade: 0 .. NUM_GRADES - 1, a higher one is more likely to be accepted.
    """

    tokens: np.ndarray
    grade: int = 0


NO_DRAFT = Draft(np.empty(0, np.int32))


class Drafter(Protocol):
    """One way to propose tokens. To add one, write a class and list it in registry.py."""

    @property
    def runs_model(self) -> bool:
        """Whether proposals take forward passes; otherwise they are looked up."""
        ...

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Note the step's events (rows released, admitted, forked). Called before they are applied to `table`."""
        ...

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        """Return a draft for each of `rows` (int32 [n]), of at most `most` tokens (int32 [n], at least 1).

        A row's known tokens are table.token_ids[row, :table.num_tokens[row]].
        """
        ...


def grade_of_match(length: int) -> int:
    """Return the grade of a draft that continues an earlier occurrence of the row's last `length` tokens."""
    for grade, bound in enumerate(_GRADE_BOUNDS):
        if length <= bound:
            return grade
    return NUM_GRADES - 1
