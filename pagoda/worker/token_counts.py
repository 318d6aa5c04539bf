"""TokenCounts: which tokens one row's penalties apply to, kept up to date instead of being counted in every step."""

import numpy as np

_FEW = 8  # up to this many new tokens are counted one by one; more (a new row) by sorting


class TokenCounts:
    """The distinct tokens of a row's history, and how often each is in its output.

    Only tokens that the worker knows to be final are kept; drafts of the current step are counted for that step alone,
    so there is nothing to undo when they are rejected. If a row continues from an earlier position, it is counted anew.
    """

    def __init__(self, num_prompt: int, first_penalized: int | None = 0) -> None:
        """first_penalized: from this position on, tokens of the prompt are penalized too; None: only the output."""
        self._num_prompt = num_prompt
        self._begin = num_prompt if first_penalized is None else first_penalized
        self._start_over()

    def _start_over(self) -> None:
        self._end = self._begin  # tokens before this position are counted
        self._index: dict[int, int] = {}
        self._ids = np.empty(0, np.int32)
        self._counts = np.empty(0, np.int32)

    def before(self, position: int, token_ids: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens before `position` and their counts in the output, both int32.

        token_ids: int32 [max_len], the row's tokens.   num_tokens: how many of them are known; what follows are drafts.
        The arrays are valid until the next call.
        """
        end = min(position, num_tokens)
        if end < self._end:
            self._start_over()
        if end - self._end > _FEW:
            self._count_all(token_ids[:end])
        else:
            for at in range(self._end, end):
                self._count(int(token_ids[at]), at >= self._num_prompt)
        self._end = max(self._end, end)
        used = len(self._index)
        ids, counts = self._ids[:used], self._counts[:used]
        return (ids, counts) if position <= end else _with_drafts(ids, counts, token_ids[end:position])

    def _count(self, token: int, in_output: bool) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            room = max(16, 2 * index)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int32)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.int32)])
        self._ids[index] = token
        self._counts[index] += in_output

    def _count_all(self, token_ids: np.ndarray) -> None:
        ids = np.unique(token_ids[self._begin :])
        self._counts = np.zeros(len(ids), np.int32)
        used, counts = np.unique(token_ids[self._num_prompt :], return_counts=True)
        self._counts[np.searchsorted(ids, used)] = counts
        self._ids = ids.astype(np.int32)
        self._index = dict(zip(ids.tolist(), range(len(ids)), strict=True))


def _with_drafts(ids: np.ndarray, counts: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies to which the drafts are added. They are output: only a whole prompt is followed by drafts."""
    both = np.concatenate([ids, drafts])
    distinct, where = np.unique(both, return_inverse=True)
    total = np.zeros(len(distinct), np.int32)
    np.add.at(total, where, np.concatenate([counts, np.ones(len(drafts), np.int32)]))
    return distinct, total
