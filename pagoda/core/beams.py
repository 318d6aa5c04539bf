"""PendingBeams: the beams that were chosen since the last SchedulerOutput was built."""

from dataclasses import dataclass, field

import numpy as np

from pagoda.core.scheduler_output import NO_BEAMS, BeamRows


@dataclass(slots=True, eq=False)
class PendingBeams:
    """What workers must be told with the next SchedulerOutput."""

    _chosen: list[tuple[int, int, int, int]] = field(default_factory=list)  # row, source, position, token

    def post(self, row: int, source: int, position: int, token_id: int) -> None:
        """`row` continues the tokens and blocks of row `source`, with `token_id` at `position`."""
        self._chosen.append((row, source, position, token_id))

    def remove_row(self, row: int) -> None:
        """The row's sequence has left it. Beams of one request leave together: no other row continues this one."""
        if self._chosen:
            self._chosen = [one for one in self._chosen if one[0] != row]

    def drain(self) -> BeamRows:
        """Return what the SchedulerOutput being built must say."""
        if not self._chosen:
            return NO_BEAMS
        columns = np.array(self._chosen, np.int32)
        self._chosen = []
        return BeamRows(*(np.ascontiguousarray(column) for column in columns.T))
