"""Log-probabilities of prompt tokens: computed in pieces with a step, joined once they are on the host."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from pagoda.core.scheduler_output import LogprobColumns
from pagoda.kernels.transfer import to_device
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.inputs import StepInputs
from pagoda.worker.sampler import Sampler

_LOGITS_ROWS = 256  # prompt positions whose logits are in memory at once


def prompt_logprobs(
    inputs: StepInputs, table: DeviceTable, sampler: Sampler, logits: Callable[[int, int], torch.Tensor]
) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
    """Compute the log-probabilities of the next prompt token at the step's prompt positions that need them.

    logits: of logits_index[begin:end], float32 [end - begin, V].
    Return (row, number of pieces) of each row, and three tensors for each piece.
    """
    counts: list[tuple[int, int]] = []
    pieces: list[torch.Tensor] = []
    offset = inputs.num_logits
    for row, first, count in inputs.prompt_rows:
        k = int(table.num_prompt_logprobs[row])
        spans = list(_spans(count, _LOGITS_ROWS))
        for begin, end in spans:
            of_span = logits(offset + begin, offset + end)
            following = table.token_ids[row, first + begin + 1 : first + end + 1].astype(np.int64)
            (chosen,) = to_device([following], of_span.device)
            columns = sampler.top_logprobs(of_span, chosen, k)
            pieces += [columns.token_ids, columns.logprobs, columns.ranks]
        counts.append((row, len(spans)))
        offset += count
    return counts, pieces


def prompt_logprob_columns(counts: list[tuple[int, int]], arrays: list[np.ndarray]) -> dict[int, LogprobColumns]:
    """Return the columns of each row of `prompt_logprobs`.   arrays: copies of its tensors."""
    found: dict[int, LogprobColumns] = {}
    at = 0
    for row, num_pieces in counts:
        columns = [np.concatenate(arrays[at + nth : at + 3 * num_pieces : 3]) for nth in range(3)]
        found[row] = LogprobColumns(*columns)
        at += 3 * num_pieces
    return found


def _spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of 0 .. count in pieces of at most `most`."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
