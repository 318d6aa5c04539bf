"""DecodeInputs: the device memory that the graphs of decode steps read, filled by the one copy of a step's inputs."""

from dataclasses import dataclass

import numpy as np
import torch

from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.transfer import bulk_copy

_SHORTEST_CONTEXT = 1024  # tokens: shorter contexts share a graph
_MOST_TOKENS = 512
_TOKEN_BYTES = 256  # of a token, next to its slots: its row, position, and how the next token is drawn
_SPARE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """The size to which a step is padded.

    max_query_len: most tokens of a row.   context: tokens of the longest sequence.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    context: int


def padded_count(count: int) -> int:
    """Return the rows, or tokens, of the graph for so many: 1, 2, 4, then multiples of 8 to 64, of 16 to 256, of 32."""
    if count <= 4:
        return 4 if count == 3 else count
    step = 8 if count <= 64 else 16 if count <= 256 else 32
    return -(-count // step) * step


def padded_context(seq_len: int, longest: int) -> int:
    """Return the context of the graph for a batch whose longest row has `seq_len` tokens: a power of two, or all."""
    return min(max(_SHORTEST_CONTEXT, 1 << (seq_len - 1).bit_length()), longest)


class DecodeInputs:
    """The inputs of steps that only decode or verify drafts, padded to a size, at the same addresses for each size.

    The next step's copy is submitted after everything that reads this step's inputs, to the same stream, so one such
    memory is enough. What the host fills is new pinned memory in each step (see `bulk_copy`).
    """

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device, max_query_len: int = 1) -> None:
        """max_rows: of the scheduler's table.   max_model_len: longest sequence, with positions past its end.

        max_query_len: tokens of a row, one and its drafts, in steps that are padded.
        """
        self._most_tokens = min(padded_count(max_rows * max_query_len), _MOST_TOKENS)
        self._longest = max_model_len
        self._max_query_len = max_query_len
        self._device = device
        self._memory: torch.Tensor | None = None
        self.is_off = False  # no step is padded

    def size_of(self, num_rows: int, num_tokens: int, max_query_len: int, seq_len: int) -> PaddedSize | None:
        """Return the size to which a step is padded; None: it is not.

        max_query_len, seq_len: of the rows with most new tokens, and with most tokens.
        """
        if self.is_off or max_query_len > self._max_query_len or num_tokens > self._most_tokens:
            return None
        padded = padded_count(num_tokens)
        longest = 1 if max_query_len == 1 else self._max_query_len
        # The tokens that fill the step up belong to rows that do, as long as any row may be.
        num_more = -(-(padded - num_tokens) // longest)
        return PaddedSize(padded, padded_count(num_rows + num_more), longest, padded_context(seq_len, self._longest))

    def move(self, arrays: list[np.ndarray], block_size: int, num_groups: int) -> list[torch.Tensor]:
        """Return the arrays on the device after one copy. Those at the beginning are of a padded step: see `holds`.

        num_groups: KV groups.   Raises InvariantBroken for more than one token to sample per token of the step.
        """
        if self._memory is None:
            of_group = 4 * -(-self._longest // block_size) + 8
            size = self._most_tokens * (_TOKEN_BYTES + num_groups * of_group) + _SPARE_BYTES
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return bulk_copy(arrays, self._device, self._memory)

    def holds(self, batch: ForwardBatch) -> bool:
        """Return whether a batch is what `move` brought, with the token ids as the first array."""
        if batch.variant or self._memory is None:
            return False
        return batch.token_ids.data_ptr() == self._memory.data_ptr()
