"""The tokens that a step samples: which rows they are for, the logits they are drawn from, and how."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.sampling.draw_params import DrawParams
from pagoda.kernels.sampling.reference import uniforms
from pagoda.worker.table_mirror import TableMirror


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The draws of a step, on the host.

    rows, positions: int32 [num_draws].   logits: int64 [num_draws], which of `logits_index` each reads; None: its own.
    logits_index: int64, token positions of the batch with logits.   num: int32 [num_samples], draws of each.
    """

    rows: np.ndarray
    positions: np.ndarray
    logits: np.ndarray | None
    logits_index: np.ndarray
    num: np.ndarray


def step_draws(output: SchedulerOutput, query_start: np.ndarray, seq_lens: np.ndarray) -> Draws:
    """Return which tokens to sample, and from which token positions of the batch."""
    index = output.sample_index
    num = np.ones(len(index), np.int32)
    last = query_start[index + 1].astype(np.int64) - 1
    positions = seq_lens[index]
    if not output.drafts:
        if not output.forks:
            return Draws(output.sample_rows, positions, None, last, num)
        shared, logits = np.unique(last, return_inverse=True)
        return Draws(output.sample_rows, positions, logits, shared, num)
    num_drafts = np.zeros(len(query_start) - 1, np.int32)
    for i in np.flatnonzero(np.isin(output.rows, np.fromiter(output.drafts, np.int32, len(output.drafts)))):
        num_drafts[i] = len(output.drafts[int(output.rows[i])])
    num += num_drafts[index]
    ends = np.cumsum(num)
    # Distance of each draw from the last position of its sample row: num - 1 .. 0.
    back = np.repeat(ends, num) - 1 - np.arange(ends[-1] if ends.size else 0)
    rows, positions = np.repeat(output.sample_rows, num), (np.repeat(positions, num) - back).astype(np.int32)
    logits_index = np.repeat(last, num) - back
    if not output.forks:
        return Draws(rows, positions, None, logits_index, num)
    shared, logits = np.unique(logits_index, return_inverse=True)
    return Draws(rows, positions, logits, shared, num)


def draw_params(table: TableMirror, rows: np.ndarray, positions: np.ndarray) -> DrawParams | None:
    """Return how the tokens at `positions` of `rows` (int32 [n]) are drawn; None if all are greedy."""
    temperature = table.temperature[rows]
    if not temperature.any():
        return None
    uniform = uniforms(table.seeds[rows], positions)
    return DrawParams(temperature, table.top_k[rows], table.top_p[rows], table.min_p[rows], uniform)
