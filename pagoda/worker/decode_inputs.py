"""DecodeInputs: the device memory that the graphs of decode steps read, filled by the one copy of a step's inputs."""

import numpy as np
import torch

from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.transfer import bulk_copy

_SHORTEST_CONTEXT = 1024  # tokens: shorter contexts share a graph
_MOST_ROWS = 512
_ROW_BYTES = 256  # of a row, next to its block tables and slots: token, position, and how its next token is drawn
_SPARE_BYTES = 4096


def padded_rows(num_rows: int) -> int:
    """Return the rows of the graph for a batch: 1, 2, 4, then multiples of 8 to 64, of 16 to 256, and of 32."""
    if num_rows <= 4:
        return 4 if num_rows == 3 else num_rows
    step = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def padded_context(seq_len: int, longest: int) -> int:
    """Return the context of the graph for a batch whose longest row has `seq_len` tokens: a power of two, or all."""
    return min(max(_SHORTEST_CONTEXT, 1 << (seq_len - 1).bit_length()), longest)


class DecodeInputs:
    """The inputs of steps that only decode, padded to a size, at the same addresses in all steps of that size.

    The next step's copy is submitted after everything that reads this step's inputs, to the same stream, so one such
    memory is enough. What the host fills is new pinned memory in each step (see `bulk_copy`).
    """

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device) -> None:
        """max_rows: of the scheduler's table.   max_model_len: longest sequence, with positions past its end."""
        self._most_rows = min(padded_rows(max_rows), _MOST_ROWS)
        self._longest = max_model_len
        self._device = device
        self._memory: torch.Tensor | None = None
        self.is_off = False  # no step is padded

    def size_of(self, num_rows: int, seq_len: int) -> tuple[int, int] | None:
        """Return the rows and the context to which a step is padded; None: it is not.

        seq_len: of the longest row.
        """
        if self.is_off or num_rows > self._most_rows:
            return None
        return padded_rows(num_rows), padded_context(seq_len, self._longest)

    def move(self, arrays: list[np.ndarray], block_size: int, num_groups: int) -> list[torch.Tensor]:
        """Return the arrays on the device after one copy. Those at the beginning are of a padded step: see `holds`.

        num_groups: KV groups.   Raises InvariantBroken for more than one token to sample per row.
        """
        if self._memory is None:
            of_group = 4 * -(-self._longest // block_size) + 8
            size = self._most_rows * (_ROW_BYTES + num_groups * of_group) + _SPARE_BYTES
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return bulk_copy(arrays, self._device, self._memory)

    def holds(self, batch: ForwardBatch) -> bool:
        """Return whether a batch is what `move` brought, with the token ids as the first array."""
        is_whole = not batch.variant and not batch.num_layers
        return is_whole and self._memory is not None and batch.token_ids.data_ptr() == self._memory.data_ptr()
