"""TokensInFlight: sampled tokens that are on the device, and not on the host yet."""

import numpy as np
import torch

from pagoda.core.scheduler_output import SchedulerOutput


class TokensInFlight:
    """The last sampled token of each row, on the device, where the next step finds it before the host knows it.

    tokens: int32 [max_rows], on the device.
    positions: int32 [max_rows], of the row's token that the host does not know; -1 if there is none.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.positions = np.full(max_rows, -1, np.int32)
        self._users = np.zeros(max_rows, np.int64)  # sequences that have used the row, to know a late token's own

    def apply(self, output: SchedulerOutput) -> None:
        """Forget the tokens of rows that end, begin, or continue as others."""
        ended = [*output.released.tolist(), *output.beams.rows.tolist()]
        begun = [*(init.row for init in output.admitted), *(fork.dst for fork in output.forks)]
        for row in (*ended, *begun):
            self._users[row] += 1
            self.positions[row] = -1

    def sampled(self, rows: np.ndarray, positions: np.ndarray, index: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
        """Take over a step's tokens, one for each of `rows`; return what `arrived` needs.

        rows, positions: int32 [n].   index: `rows` on the device, int64.   tokens: int64 [n], on the device.
        """
        self.tokens.index_copy_(0, index, tokens.to(torch.int32))
        self.positions[rows] = positions
        return self._users[rows]

    def arrived(self, rows: np.ndarray, positions: np.ndarray, users: np.ndarray) -> np.ndarray:
        """Note that the host knows the tokens of a step. Return which rows (bool [n]) still belong to the sequence."""
        is_same = self._users[rows] == users
        known = rows[is_same & (self.positions[rows] == positions)]
        self.positions[known] = -1
        return is_same

    def unknown(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return which of the tokens at `positions` of `rows` (int32 [n]) only the device has: int64 indices."""
        return np.flatnonzero(self.positions[rows] == positions)
