"""RequestTable: tokens and counts of all sequences. Rows of numpy columns for those that run, plain objects for others.

One row is one sequence of a running request. A sequence that waits, was preempted or is swapped out has no row; its
tokens and its computed count are kept in the Sequence until it runs again.
"""

from collections.abc import Mapping

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.request import Request, RequestState, Sequence
from pagoda.core.scheduler_output import NO_INTS, NO_TOKENS, RowTokens

_NO_LIMIT = np.iinfo(np.int32).max


class RequestTable:
    """The token columns. Everyone may read them; only the verbs below write them (readers get read-only views).

    token_ids: int32 [rows, max_model_len + 1], prompt then output. The last place is for the token that is sampled, and
        dropped, after a prompt of max_model_len tokens that is only scored.
    num_prompt_tokens, num_tokens, num_computed: int32 [rows].
    num_pending: int32 [rows], sampled tokens planned and not yet back that count as known; 0 without `expect_tokens`.
    num_in_flight: int32 [rows], tokens planned whose step is not complete; kept only with `track_in_flight`.
    is_active: bool [rows], rows of running sequences.
    is_pooled: bool [rows], samples nothing.   is_beam: bool [rows], its next token depends on its siblings'.
    length_limit: int32 [rows], num_tokens at which the row ends.
    handle, index, client: what outputs are labelled with.
    """

    def __init__(
        self, max_rows: int, max_model_len: int, *, track_in_flight: bool = False, expect_tokens: bool = False
    ) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self._token_ids, self.token_ids = _column((max_rows, max_model_len + 1), np.int32)
        self._num_prompt_tokens, self.num_prompt_tokens = _column(max_rows, np.int32)
        self._num_tokens, self.num_tokens = _column(max_rows, np.int32)
        self._num_computed, self.num_computed = _column(max_rows, np.int32)
        self._num_pending, self.num_pending = _column(max_rows, np.int32)
        self._num_in_flight, self.num_in_flight = _column(max_rows, np.int32)
        self._num_reported = np.zeros(max_rows, np.int32)  # tokens that are already reported to workers
        self._is_pooled, self.is_pooled = _column(max_rows, np.bool_)
        self._is_beam, self.is_beam = _column(max_rows, np.bool_)
        self._num_beams = 0  # rows that are marked, also given back ones until they are given out again
        self._length_limit, self.length_limit = _column(max_rows, np.int32)
        self._handle, self.handle = _column(max_rows, np.int64)
        self._index, self.index = _column(max_rows, np.int32)
        self._client, self.client = _column(max_rows, np.int32)
        self._running_order = np.zeros(max_rows, np.int64)
        self._is_active, self.is_active = _column(max_rows, np.bool_)
        self.sequence_of: list[Sequence | None] = [None] * max_rows
        self.has_pinned_rows = False
        self._track_in_flight = track_in_flight
        self._expect_tokens = expect_tokens
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._released: list[int] = []  # not yet reported to workers
        self._pinned: list[tuple[int, int]] = []  # (row, step after which it is free): a late result may name it
        self._late: set[Sequence] = set()  # that left a row which is pinned, and whose late result counts

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_active_rows(self) -> int:
        """Rows of running sequences."""
        return self.max_rows - len(self._free_rows) - len(self._pinned)

    def start_over(self) -> None:
        """Give rows out as at first. None may be in use."""
        self._free_rows.sort(reverse=True)

    def limit_of(self, request: Request) -> int:
        """Return the num_tokens at which the request's sequences end."""
        if request.sampling is None:
            return _NO_LIMIT
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(request.num_prompt_tokens + max_tokens, self.max_model_len)

    # Rows are given out and come back

    def admit(self, sequence: Sequence, num_computed: int) -> int:
        """Give `sequence` a row with its tokens, `num_computed` of them computed. Return the row."""
        row = self._free_rows.pop()
        spec = sequence.request.spec
        count = len(sequence.token_ids)
        self._token_ids[row, :count] = sequence.token_ids
        self._num_prompt_tokens[row] = spec.num_prompt_tokens
        self._num_tokens[row] = self._num_reported[row] = count
        self._num_computed[row] = num_computed
        self._num_pending[row] = 0
        self._num_in_flight[row] = 0
        self._is_pooled[row] = spec.pooling is not None
        self._mark_beam(row, spec.is_beam_search)
        self._length_limit[row] = self.limit_of(spec)
        self._handle[row] = spec.handle
        self._client[row] = spec.client_index
        return self._assign(row, sequence)

    def fork(self, source: int, sequence: Sequence) -> int:
        """Give `sequence` a row that equals `source` except for its label. Return the row."""
        row = self._free_rows.pop()
        count = int(self._num_tokens[source])
        self._token_ids[row, :count] = self._token_ids[source, :count]
        counts = (self._num_prompt_tokens, self._num_tokens, self._num_computed, self._num_pending, self._length_limit)
        for column in (*counts, self._handle, self._client, self._is_pooled):
            column[row] = column[source]
        self._mark_beam(row, bool(self._is_beam[source]))
        self._num_in_flight[row] = 0
        self._num_reported[row] = count  # workers copy the row, too
        return self._assign(row, sequence)

    def _mark_beam(self, row: int, is_beam: bool) -> None:
        self._num_beams += is_beam - int(self._is_beam[row])
        self._is_beam[row] = is_beam

    def _assign(self, row: int, sequence: Sequence) -> int:
        self._running_order[row] = (sequence.request.admission << 16) | sequence.index
        self._index[row] = sequence.index
        self._is_active[row] = True
        self.sequence_of[row] = sequence
        sequence.row = row
        return row

    def overwrite(self, source: int, row: int) -> None:
        """`row`, of the same request, gets the tokens and counts of `source`. Neither may be in flight."""
        count = int(self._num_tokens[source])
        self._token_ids[row, :count] = self._token_ids[source, :count]
        self._num_tokens[row], self._num_computed[row] = count, self._num_computed[source]

    def release(self, sequence: Sequence, last_step_in_flight: int) -> None:
        """Take the row from `sequence`, which gets its tokens and its computed count back.

        The row is given out again when step `last_step_in_flight` is complete (0: at once), so that a late result
        still finds its sequence.
        """
        row = sequence.row
        sequence.token_ids = self._token_ids[row, : self._num_tokens[row]].copy()
        sequence.num_computed = int(self._num_computed[row])
        sequence.row = -1
        self._is_active[row] = False
        self._released.append(row)
        if last_step_in_flight:
            self._pinned.append((row, last_step_in_flight))
            self._late.add(sequence)
            self.has_pinned_rows = True
        else:
            self._free(row)

    def take_released(self) -> np.ndarray:
        """Return the rows that sequences have left, int32; each once."""
        if not self._released:
            return NO_INTS
        released, self._released = np.array(self._released, np.int32), []
        return released

    def has_late_results(self, request: RequestState) -> bool:
        """Return whether a sequence left its row while a step that names the row is still in flight."""
        return self.has_pinned_rows and not self._late.isdisjoint(request.sequences)

    def drop_late_results(self, request: RequestState) -> None:
        """Late results of the request's pinned rows belong to no sequence any more; they will be dropped."""
        for row, _ in self._pinned:
            sequence = self.sequence_of[row]
            if sequence is not None and sequence.request is request:
                self.sequence_of[row] = None
                self._late.discard(sequence)

    def free_pinned_rows(self, step: int) -> list[RequestState]:
        """Step `step` is complete: rows that only steps up to it name can be given out again.

        Return the requests whose late results are back.
        """
        freed = [row for row, last_step in self._pinned if last_step <= step]
        self._pinned = [pinned for pinned in self._pinned if pinned[1] > step]
        self.has_pinned_rows = bool(self._pinned)
        sequences = [sequence for row in freed if (sequence := self.sequence_of[row]) is not None]
        self._late.difference_update(sequences)
        for row in freed:
            self._free(row)
        return [sequence.request for sequence in sequences]

    def _free(self, row: int) -> None:
        self.sequence_of[row] = None
        self._free_rows.append(row)

    # Tokens and counts

    def advance(self, rows: np.ndarray, ends: np.ndarray, num_new: np.ndarray) -> None:
        """A step computes `num_new` tokens of `rows`, up to `ends`. Called when it is planned, not when it is done."""
        self._num_computed[rows] = ends
        if self._track_in_flight:
            self._num_in_flight[rows] += num_new

    def complete(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        """A step that computed `num_new` tokens of `rows` is complete."""
        if self._track_in_flight:
            self._num_in_flight[rows] -= num_new

    def expect_tokens(self, rows: np.ndarray, drafts: Mapping[int, np.ndarray]) -> None:
        """The next token of `rows`, planned and not yet back, counts as known.

        Not of rows with drafts: where those continue depends on how many are accepted. Nor of beams.
        """
        if self._expect_tokens:
            self._num_pending[self._predictable(rows, drafts)] += 1

    def settle_expected(self, rows: np.ndarray, drafts: Mapping[int, np.ndarray]) -> None:
        """The tokens that `expect_tokens` counted are back."""
        if self._expect_tokens:
            self._num_pending[self._predictable(rows, drafts)] -= 1

    def _predictable(self, rows: np.ndarray, drafts: Mapping[int, np.ndarray]) -> np.ndarray:
        return _without(rows[~self._is_beam[rows]] if self._num_beams else rows, drafts)

    def append_each(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append one token to each of `rows`. Return their new num_tokens, int32 [num_rows]."""
        end = self._num_tokens[rows]
        self._token_ids[rows, end] = tokens
        end += 1
        self._num_tokens[rows] = end
        return end

    def append_tokens(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append `tokens` to a sequence with or without a row."""
        row = sequence.row
        if row < 0:
            sequence.token_ids = np.append(sequence.token_ids, np.array(tokens, np.int32))
            return
        at = int(self._num_tokens[row])
        self._token_ids[row, at : at + len(tokens)] = tokens
        self._num_tokens[row] = at + len(tokens)

    def report_tokens(self, rows: np.ndarray) -> RowTokens:
        """Return the tokens of `rows` (int64 [n], distinct) that were appended since their last report."""
        first, counts = self._num_reported[rows], self._num_tokens[rows] - self._num_reported[rows]
        total = int(counts.sum())
        if not total:
            return NO_TOKENS
        self._num_reported[rows] += counts
        of_token = np.repeat(rows, counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)  # tokens of the rows before
        positions = np.repeat(first, counts) + np.arange(total, dtype=np.int32) - before.astype(np.int32)
        return RowTokens(of_token.astype(np.int32), positions, self._token_ids[of_token, positions])

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """The last `num_tokens` computed tokens were drafts that were rejected, or have lost their KV."""
        if sequence.row >= 0:
            self._num_computed[sequence.row] -= num_tokens
        else:
            sequence.num_computed -= num_tokens

    def restart(self, sequence: Sequence) -> None:
        """A sequence without a row, of which nothing is computed, loses its output."""
        sequence.token_ids = sequence.token_ids[: sequence.request.spec.num_prompt_tokens]

    # Questions

    @property
    def may_have_beams(self) -> bool:
        """Return False only if no row in use is a beam."""
        return self._num_beams > 0

    def num_known(self, rows: np.ndarray | int) -> np.ndarray:
        """Return how many tokens of each row are known, those that are expected included; int32 [num_rows]."""
        return self._num_tokens[rows] + self._num_pending[rows]

    def have_siblings(self, rows: np.ndarray) -> np.ndarray:
        """Return which of `rows`, in running order, are followed or preceded by one of the same request; bool."""
        requests = self._running_order[rows] >> 16
        same = requests[1:] == requests[:-1]
        return np.append(same, False) | np.append(False, same)

    def active_rows(self) -> np.ndarray:
        """int64 [n]: rows of running sequences, in running order."""
        rows = self._is_active.nonzero()[0]
        return rows[np.argsort(self._running_order[rows], kind="stable")]

    def owner(self, row: int) -> Sequence:
        """Return the sequence of a row that has one."""
        sequence = self.sequence_of[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence

    def check(self) -> None:
        """Check that each row has one sequence or none. Raises InvariantBroken."""
        for row, owner in enumerate(self.sequence_of):
            if self._is_active[row] and (owner is None or owner.row != row):
                raise InvariantBroken(f"row {row} is active but its sequence has row {owner.row if owner else None}")
        num_active = int(np.count_nonzero(self._is_active))
        if len(self._free_rows) + len(self._pinned) + num_active != self.max_rows:
            raise InvariantBroken("a row is lost or counted twice")


def _without(rows: np.ndarray, drafts: Mapping[int, np.ndarray]) -> np.ndarray:
    return rows[~np.isin(rows, np.fromiter(drafts, np.int32, len(drafts)))] if drafts else rows


def readonly(column: np.ndarray) -> np.ndarray:
    """Return a view of `column` that follows its content and cannot be written through."""
    view = column.view()
    view.flags.writeable = False
    return view


def _column(shape: int | tuple[int, int], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Return a column for the table to write, and the view that everyone else reads."""
    column = np.zeros(shape, dtype)
    return column, readonly(column)
