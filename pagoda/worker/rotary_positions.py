"""RotaryPositions: the positions of tokens for the rotary embedding, of a model that has several kinds of them."""

from collections.abc import Sequence

import numpy as np

from pagoda.core.request import MediaItem
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.models.base import POSITION_KINDS, Model


class RotaryPositions:
    """A time, a row and a column for each token. They are a token's place among the row's tokens, but for images.

    They follow from a request's items alone, so that they are the same in any chunk, after a preemption or a restart.
    """

    def __init__(self, model: Model, max_rows: int) -> None:
        """model: says what positions an item has.   max_rows: of the table."""
        self._model, self._runs = model, np.array(model.position_runs)
        self._shift = np.zeros(max_rows, np.int32)  # position minus place of the tokens after a row's last item
        self._before: dict[int, np.ndarray] = {}  # of those up to it, while some are not computed: int32 [n, kinds]

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events."""
        for row in output.released.tolist():
            self._set(row, 0, None)
        for init in output.admitted:
            self._set(init.row, *(self._positions_of(init.media) if init.media else (0, None)))
        for fork in output.forks:
            self._set(fork.dst, int(self._shift[fork.src]), self._before.get(fork.src))

    def of(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the positions of the tokens at `places` of `rows` (int32 [n]), for each run of a head: [n, runs]."""
        found = np.repeat((places + self._shift[rows])[:, None], POSITION_KINDS, axis=1)
        for row in np.intersect1d(rows, np.fromiter(self._before, np.int32, len(self._before))).tolist():
            before = self._before[row]
            at = np.flatnonzero((rows == row) & (places < len(before)))
            found[at] = before[places[at]]
            if not at.size:
                del self._before[row]
        return np.take(found, self._runs, axis=1)

    def _set(self, row: int, shift: int, before: np.ndarray | None) -> None:
        self._shift[row] = shift
        self._before.pop(row, None)
        if before is not None:
            self._before[row] = before

    def _positions_of(self, media: Sequence[MediaItem]) -> tuple[int, np.ndarray]:
        """Return position minus place after the last item, and the positions up to there: int32 [n, kinds]."""
        parts: list[np.ndarray] = []
        place = position = 0
        for item in media:
            text = np.arange(position, position + item.offset - place, dtype=np.int32)
            own, taken = self._model.media_positions(item.grid)
            parts += [np.repeat(text[:, None], POSITION_KINDS, axis=1), own + position + len(text)]
            place, position = item.offset + item.length, position + len(text) + taken
        return position - place, np.concatenate(parts)
