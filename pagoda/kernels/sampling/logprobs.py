"""Log-probabilities of sampled tokens and of the most likely ones, in torch: the definition, and used on a GPU."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """LogprobColumns where they were computed.   token_ids, logprobs: int32, float32 [n, 1 + k].   ranks: int32 [n]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> LogprobTensors:
    """Log-softmax of the chosen token and of the k best (k may be 0), with the chosen one's rank.

    logits: float32 [n, V].   chosen: int64 [n].   Which ids are reported among equals of the k-th best is not defined.
    """
    ids = chosen.unsqueeze(1)
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, ids)
    ranks = (logits > own).sum(-1) + 1
    best, best_ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return LogprobTensors(
        token_ids=torch.cat([ids, best_ids], 1).int(),
        logprobs=torch.cat([own, best], 1) - normaliser,
        ranks=ranks.int(),
    )
