"""The definition of the ops that ranks compute together. Every rank must call them in the same order."""

import torch

from pagoda.base.errors import WorkerDied
from pagoda.kernels.collectives.group import Communicator


def all_reduce(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Sum the ranks' x [T, ...] in float32, in the order of the ranks; rounded once to its dtype."""
    first, *others = ranks.exchange(x)
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(x.dtype)


def all_gather(x: torch.Tensor, width: int, ranks: Communicator) -> torch.Tensor:
    """Concatenate the ranks' x [T, width of this rank] in their order -> [T, width]."""
    whole = torch.cat(ranks.exchange(x), dim=1)
    if whole.shape[1] != width:
        raise WorkerDied(f"all_gather: the ranks' parts have {whole.shape[1]} columns together, not {width}")
    return whole


def send_rows(x: torch.Tensor, ranks: Communicator) -> None:
    """Send x [T, ...] to this rank in the next stage."""
    ranks.send(x)


def receive_rows(token_ids: torch.Tensor, like: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Return [T, ...] from this rank in the stage before: a row per token, with the shape and dtype of `like`."""
    out = torch.empty((len(token_ids), *like.shape), dtype=like.dtype, device=like.device)
    ranks.receive(out)
    return out
