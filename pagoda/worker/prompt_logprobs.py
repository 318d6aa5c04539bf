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
    if not inputs.prompt_rows:
        return counts, pieces
    offset, device = inputs.num_logits, inputs.draw_index.device
    following = [table.token_ids[row, first + 1 : first + count + 1] for row, first, count in inputs.prompt_rows]
    (chosen,) = to_device([np.concatenate(following).astype(np.int64)], device)
    for (row, _, count), of_row in zip(inputs.prompt_rows, chosen.split([len(ids) for ids in following]), strict=True):
        k = int(table.num_prompt_logprobs[row])
        spans = list(_spans(count, _LOGITS_ROWS))
        for begin, end in spans:
            columns = sampler.top_logprobs(logits(offset + begin, offset + end), of_row[begin:end], k)
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
