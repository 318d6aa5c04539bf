"""StepPlan: one step while it is planned."""

from dataclasses import dataclass, field

import numpy as np

from pagoda.core.request import AdmitKind, Reason, RequestState
from pagoda.core.scheduler_output import NO_INTS, EncoderRun, RowFork


@dataclass(slots=True)
class Chunk:
    """What a row may compute in a step.

    num_new: tokens; if 0, `reason` says why.   to_encode: media items to run first.   repeated: items equal to one of
    those.   num_found: items that begin in it and whose outputs are cached.
    """

    num_new: int
    reason: Reason = Reason.BUDGET
    num_found: int = 0
    to_encode: list[int] = field(default_factory=list[int])
    repeated: list[int] = field(default_factory=list[int])


class StepPlan:
    """What has been decided so far. Planning writes the first part; `finish_plan` fills in the second.

    budget, encoder_budget: tokens left.   now_s: when it was opened.
    row_cap: most tokens of a prompt that one row gets, 0 for no cap.
    prompt_budget: tokens left for prompts, None for no limit of their own.   prompts: placed rows that take of it.
    most_decodes: running rows that may decode, None for all.   decodes: those that are placed, if there is a limit.
    entering: row -> (kind, computed tokens), of rows that workers get to know in this step.
    closed_to_adapters: a request has waited too long for its adapter: no request with one enters after it.
    has_filled_cache: what running rows fill has been inserted into the prefix cache.
    is_steady: the rows placed first are a steady step, whose `at`, `ends` and `sample_index` are known.

    rows, start, num_new, ends: int32 [num_rows], everything placed, in that order.   at: int64 [num_rows], `rows`.
    has_prompts: a row computes more than its last token.
    """

    row_cap = 0
    prompt_budget: int | None = None
    most_decodes: int | None = None
    num_scheduled = 0
    closed_to_adapters = False
    has_filled_cache = False
    is_steady = False
    rows = start = num_new = ends = sample_rows = sample_index = NO_INTS
    at: np.ndarray = NO_INTS
    has_prompts = False

    def __init__(self, step: int, budget: int, encoder_budget: int, now_s: float) -> None:
        self.step = step
        self.budget = budget
        self.encoder_budget = encoder_budget
        self.now_s = now_s
        self._placed: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.prompts: set[int] = set()
        self.decodes: set[int] = set()
        self.drafts: dict[int, np.ndarray] = {}
        self.encoder_runs: dict[int, list[EncoderRun]] = {}
        self.entering: dict[int, tuple[AdmitKind, int]] = {}
        self.preempted: list[RequestState] = []
        self.forks: list[RowFork] = []

    def place(self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray, total: int) -> None:
        """`rows` compute `num_new` tokens from `start` on (int32 [n] each), `total` in all."""
        self._placed.append((rows, start, num_new))
        self.budget -= total
        self.num_scheduled += total

    def spend(self, num_tokens: int) -> None:
        """A row that enters takes `num_tokens` tokens from the budgets."""
        self.budget -= num_tokens
        if self.prompt_budget is not None:
            self.prompt_budget -= num_tokens

    def unplan_row(self, row: int) -> None:
        """The row does not run in this step after all; its share of the budget is returned."""
        self.is_steady = False
        rows, start, num_new = self.arrays()
        keep = rows != row
        returned = int(num_new[~keep].sum())
        self._placed = [(rows[keep], start[keep], num_new[keep])]
        self.budget += returned
        self.num_scheduled -= returned
        if self.prompt_budget is not None and row in self.prompts:
            self.prompts.remove(row)
            self.prompt_budget += returned
        self.decodes.discard(row)
        self.drafts.pop(row, None)
        self.entering.pop(row, None)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, start, num_new of what is placed so far: int32 [num_rows]."""
        if len(self._placed) == 1:
            return self._placed[0]
        rows, start, num_new = zip(*(self._placed or [(NO_INTS, NO_INTS, NO_INTS)]), strict=True)
        return np.concatenate(rows), np.concatenate(start), np.concatenate(num_new)

    def ends_of(self, num_computed: np.ndarray) -> np.ndarray:
        """Return the computed counts after this step, as planned so far; int32 [rows of the table]."""
        rows, start, num_new = self.arrays()
        ends = num_computed.copy()
        ends[rows] = start + num_new
        return ends
