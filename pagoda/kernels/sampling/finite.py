"""Rows of logits that are not finite: their draws fail, but the arithmetic of sampling must not meet them."""

import torch


def without_nonfinite(
    logits: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return logits float32 [S, V] and best (see SamplingOps.best_tokens) with zeros for rows that are not finite.

    The arguments themselves where all rows are finite. Waits for the device.
    """
    finite = best[0].isfinite()
    if bool(finite.all()):
        return logits, best
    values, ids = torch.where(finite, best[0], 0.0), torch.where(finite, best[1], 0)
    return torch.where(finite.unsqueeze(1), logits, 0.0), (values, ids)
