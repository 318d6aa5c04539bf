"""DrawParams: how one token is drawn from each row of a batch of logits."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class DrawParams:
    """The parameters of S draws, as columns [S].

    temperature: float32, 0 is greedy.   top_k: int32, 0 is off.   top_p: float32 in (0, 1], 1 is off.
    min_p: float32 in [0, 1], 0 is off.   uniform: float64 in [0, 1), unused by greedy rows.
    on_device: the columns in this order on the device of the logits, if they are there already.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    on_device: tuple[torch.Tensor, ...] | None = None

    @property
    def columns(self) -> list[np.ndarray]:
        """Return the columns, each contiguous and of its own type."""
        return [
            np.ascontiguousarray(self.temperature, np.float32),
            np.ascontiguousarray(self.top_k, np.int32),
            np.ascontiguousarray(self.top_p, np.float32),
            np.ascontiguousarray(self.min_p, np.float32),
            np.ascontiguousarray(self.uniform, np.float64),
        ]

    def __getitem__(self, rows: np.ndarray | slice) -> "DrawParams":
        """Return the draws of some rows."""
        return DrawParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )
