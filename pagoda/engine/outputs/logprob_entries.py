"""Log-probabilities as users see them, from the engine core's columns: one entry per position."""

from collections import deque
from collections.abc import Sequence

from pagoda.base.outputs import Logprob
from pagoda.core.scheduler_output import LogprobColumns
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_POSITIONS_AT_ONCE = 64
"""About 1 ms of work with 20 entries each."""


class PromptLogprobs:
    """rows: one entry per prompt position that has been converted; the first is None, as it has no prefix.

    Storing columns costs nothing; converting thousands of positions takes long, so an event loop converts them in
    pieces, and only when the request's own reader needs them.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int, tokenizer: Tokenizer) -> None:
        self.rows: list[dict[int, Logprob] | None] = [None]
        self._num_missing = num_prompt_tokens - 1
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._columns: deque[LogprobColumns] = deque()

    def add(self, columns: LogprobColumns) -> None:
        """Add the columns of the next positions, which arrive in order. Ignores more than the prompt has."""
        size = len(columns.ranks)
        for at in range(0, min(size, self._num_missing), _POSITIONS_AT_ONCE):
            part = slice(at, min(at + _POSITIONS_AT_ONCE, self._num_missing))
            self._columns.append(LogprobColumns(columns.token_ids[part], columns.logprobs[part], columns.ranks[part]))
        self._num_missing -= min(size, self._num_missing)

    @property
    def has_more(self) -> bool:
        """Whether positions have arrived that are not converted."""
        return bool(self._columns)

    def convert_some(self) -> bool:
        """Convert a few positions. Return whether more are left."""
        if self._columns:
            columns = self._columns.popleft()
            self.rows += [
                logprob_entry(columns, row, self._num_top, self._tokenizer) for row in range(len(columns.ranks))
            ]
        return bool(self._columns)


def logprob_entry(columns: LogprobColumns, row: int, num_top: int, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return one position's candidates by token id: the sampled one, then the `num_top` most likely."""
    ids: Sequence[int] = columns.token_ids[row, : num_top + 1].tolist()
    values: Sequence[float] = columns.logprobs[row, : num_top + 1].tolist()
    entry = {ids[0]: Logprob(values[0], int(columns.ranks[row]), _shown(tokenizer, ids[0]))}
    for rank, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1):
        entry.setdefault(token_id, Logprob(value, rank, _shown(tokenizer, token_id)))
    return entry


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
