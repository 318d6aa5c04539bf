"""PromptEmbeds: the prompt embeddings of rows, until they are computed."""

from dataclasses import dataclass

import numpy as np
import torch

from pagoda.core.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True, eq=False)
class StepEmbeds:
    """Embeddings of one step.   values: [n, hidden].   index: int64 [n], which of the step's tokens each is of."""

    values: torch.Tensor
    index: np.ndarray


class PromptEmbeds:
    """Holds the embeddings of the rows whose prompts are not computed up to their last one, in the compute type."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._of_row: dict[int, torch.Tensor] = {}

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events. A fork needs nothing: its prompt is computed."""
        for row in output.released.tolist():
            self._of_row.pop(row, None)
        for init in output.admitted:
            self._of_row.pop(init.row, None)
            if init.prompt_embeds is not None and init.num_computed < len(init.prompt_embeds):
                # torch warns of arrays that cannot be written to, as those from another process; this copies.
                given = torch.tensor(init.prompt_embeds, dtype=self._dtype)
                self._of_row[init.row] = given.to(self._device)

    def take(self, output: SchedulerOutput) -> StepEmbeds | None:
        """Return the embeddings that the step needs, None for none; drop those of prompts that it computes to the end.

        `output` must have been applied.
        """
        if not self._of_row:
            return None
        ends = np.cumsum(output.num_new)
        values: list[torch.Tensor] = []
        index: list[np.ndarray] = []
        for i in np.flatnonzero(np.isin(output.rows, list(self._of_row))).tolist():
            row, start, num_new = int(output.rows[i]), int(output.start[i]), int(output.num_new[i])
            of_row = self._of_row[row]
            values.append(of_row[start : start + num_new])
            begin = int(ends[i]) - num_new
            index.append(np.arange(begin, begin + len(values[-1]), dtype=np.int64))
            if start + num_new >= len(of_row):
                del self._of_row[row]
        if not values:
            return None
        return StepEmbeds(torch.cat(values) if len(values) > 1 else values[0], np.concatenate(index))
