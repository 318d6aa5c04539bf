"""DecodeInputs: the device memory that the graphs of decode steps read, filled by the one copy of a step's inputs."""

from dataclasses import dataclass

import numpy as np
import torch

from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.transfer import bulk_copy

_SHORTEST_CONTEXT = 1024  # tokens: shorter contexts share a graph
_MOST_TOKENS = 512
_TOKEN_BYTES = 256  # per token, not counting its slots and block tables
_SPARE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """The size to which a step is padded.

    max_query_len: most new tokens of a row.   context: tokens of the longest sequence.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    context: int


def padded_rows(count: int) -> int:
    """Round a number of decoding rows up: 1, 2, 4, multiples of 8 up to 64, of 16 up to 256, then of 32."""
    if count <= 4:
        return _power_of_two(count)
    step = 8 if count <= 64 else 16 if count <= 256 else 32
    return -(-count // step) * step


def padded_tokens(count: int) -> int:
    """Round a number of tokens up where rows have several: 1, 2, 4, multiples of 8 up to 64, then 4 sizes per doubling.

    Fewer sizes than for decoding rows, because each comes with several numbers of rows.
    """
    if count <= 64:
        return padded_rows(count)
    step = _power_of_two(count) // 8
    return -(-count // step) * step


def padded_context(seq_len: int, longest: int) -> int:
    """Return the context of the graph for a batch whose longest row has `seq_len` tokens: a power of two, or all."""
    return min(max(_SHORTEST_CONTEXT, _power_of_two(seq_len)), longest)


def _power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class DecodeInputs:
    """The inputs of steps of few tokens per row, padded to a size, at the same addresses in all steps of that size.

    The next step's copy is submitted after everything that reads this step's inputs, to the same stream, so one such
    memory is enough. What the host fills is new pinned memory in each step (see `bulk_copy`).
    """

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device, max_query_len: int = 1) -> None:
        """max_rows: of the scheduler's table.   max_model_len: longest sequence, with positions past its end.

        max_query_len: most new tokens of a row in steps that are padded: one and its drafts.
        """
        most = max_rows * max_query_len
        self._most_tokens = min(max(padded_rows(most), padded_tokens(most)), _MOST_TOKENS)
        self._longest = max_model_len
        self._max_query_len = max_query_len
        self._device = device
        self._memory: torch.Tensor | None = None
        self.is_off = False  # no step is padded

    def size_of(self, num_rows: int, num_tokens: int, max_query_len: int, seq_len: int) -> PaddedSize | None:
        """Return the size to which a step is padded; None: it is not.

        max_query_len: most new tokens of a row.   seq_len: tokens of the longest sequence.
        """
        if self.is_off or max_query_len > self._max_query_len or num_tokens > self._most_tokens:
            return None
        context = padded_context(seq_len, self._longest)
        if max_query_len == 1:
            padded = padded_rows(num_tokens)
            return PaddedSize(padded, padded, 1, context)
        padded = padded_tokens(num_tokens)
        per_row = min(_power_of_two(max_query_len), self._max_query_len)
        # Padding tokens belong to padding rows, which are as long as any row may be.
        num_padding_rows = -(-(padded - num_tokens) // per_row)
        return PaddedSize(padded, min(_power_of_two(num_rows + num_padding_rows), padded), per_row, context)

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
        if self._memory is None:
            return False
        return batch.token_ids.data_ptr() == self._memory.data_ptr()
