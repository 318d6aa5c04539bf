"""batch_constraints: gather the logit constraints of a step's draws from the table."""

import numpy as np

from pagoda.kernels.constraints.batch import BatchConstraints, TokenLists
from pagoda.worker.device_table import DeviceTable

_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


def batch_constraints(
    table: DeviceTable, draws: np.ndarray, rows: np.ndarray, positions: np.ndarray
) -> BatchConstraints:
    """Return what changes in the logits of the draws (int64 [m]) of constrained rows (int32 [m]).

    positions: int32 [m], of the tokens to sample. A row may occur several times, at ascending positions.
    """
    of_row = [constraints for row in rows.tolist() if (constraints := table.constraints[row]) is not None]
    assert len(of_row) == len(rows), "table.constrained disagrees with table.constraints"

    penalized, counts = _penalized(table, rows, positions)
    values = [constraints.bias for constraints in of_row if constraints.bias.size]
    forbidden = [
        constraints.forbidden(table.token_ids[row, num_prompt:position])
        for constraints, row, num_prompt, position in zip(
            of_row, rows.tolist(), table.num_prompt[rows].tolist(), positions.tolist(), strict=True
        )
    ]
    return BatchConstraints(
        rows=draws,
        bias=TokenLists.of([constraints.bias_ids for constraints in of_row]),
        bias_values=np.concatenate(values) if values else _NO_VALUES,
        penalized=penalized,
        output_counts=counts,
        repetition=table.repetition[rows],
        frequency=table.frequency[rows],
        presence=table.presence[rows],
        allowed=[constraints.allowed for constraints in of_row],
        forbidden=TokenLists.of(forbidden),
    )


def _penalized(table: DeviceTable, rows: np.ndarray, positions: np.ndarray) -> tuple[TokenLists, np.ndarray]:
    """Return the tokens that the penalties of each draw apply to, and their counts in the output (int32)."""
    ids, counts = [], []
    for row, position, num_tokens in zip(
        rows.tolist(), positions.tolist(), table.num_tokens[rows].tolist(), strict=True
    ):
        counted = table.token_counts[row]
        if counted is None:
            found, times = _NO_IDS, _NO_IDS
        else:
            found, times = counted.before(position, table.token_ids[row], num_tokens)
        ids.append(found)
        counts.append(times)
    return TokenLists.of(ids), np.concatenate(counts)
