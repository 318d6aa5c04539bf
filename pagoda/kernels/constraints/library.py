"""A batch's logit constraints in a few torch calls, on any device."""

import numpy as np
import torch

from pagoda.kernels.constraints.batch import BatchConstraints, TokenLists


def constrain(logits: torch.Tensor, constraints: BatchConstraints) -> None:
    """See reference.constrain; gives the same bits."""
    constraints.check(*logits.shape)
    device = logits.device

    def cells(lists: TokenLists) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each id, int64, on the device of the logits."""
        rows = torch.from_numpy(constraints.rows[lists.rows])
        return rows.to(device), torch.from_numpy(lists.ids.astype(np.int64)).to(device)

    def per_id(column: np.ndarray, lists: TokenLists) -> torch.Tensor:
        return torch.from_numpy(column[lists.rows]).to(device)

    if constraints.bias.ids.size:
        at = cells(constraints.bias)
        logits[at] = logits[at] + torch.from_numpy(constraints.bias_values).to(device)
    if constraints.penalized.ids.size:
        at = cells(constraints.penalized)
        repetition, frequency, presence = (
            per_id(column, constraints.penalized)
            for column in (constraints.repetition, constraints.frequency, constraints.presence)
        )
        counts = torch.from_numpy(constraints.output_counts).to(device)
        values = logits[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = torch.where(counts > 0, values - (frequency * counts.float() + presence), values)
    for row, mask in zip(constraints.rows.tolist(), constraints.allowed, strict=True):
        if mask is not None:
            logits[row, : len(mask)].masked_fill_(~torch.from_numpy(mask).to(device), -torch.inf)
            logits[row, len(mask) :] = -torch.inf
    if constraints.forbidden.ids.size:
        logits[cells(constraints.forbidden)] = -torch.inf
