"""Log-probabilities of sampled tokens and of the most likely ones, in torch: the definition, and used on a GPU."""

import numpy as np
import torch

from pagoda.core.scheduler_output import LogprobColumns


def top_logprobs(logits: torch.Tensor, chosen: np.ndarray, k: int) -> LogprobColumns:
    """Log-softmax of the chosen token and of the k best (k may be 0), with the chosen one's rank.

    logits: float32 [n, V].   chosen: int [n].   Which ids are reported among equals of the k-th best is not defined.
    """
    ids = torch.from_numpy(chosen.astype(np.int64)).to(logits.device).unsqueeze(1)
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, ids)
    ranks = (logits > own).sum(-1) + 1
    best, best_ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return LogprobColumns(
        token_ids=torch.cat([ids, best_ids], 1).int().cpu().numpy(),
        logprobs=(torch.cat([own, best], 1) - normaliser).cpu().numpy(),
        ranks=ranks.int().cpu().numpy(),
    )
