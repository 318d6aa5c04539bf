"""Pooler: turn the final hidden states of prompts into embeddings and class scores.

A prompt may be computed in several chunks. What an earlier chunk contributes is kept by request, so that it survives
a swap to the host, and a sum is continued token by token: the chunks do not change its bits.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.base.pooling import PER_TOKEN, PoolingKind, PoolingParams, PoolingPlan
from pagoda.core.request import RequestKey
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.alignment import CrossQueries
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.staging import PooledChunk

NOT_FINITE = "the model's hidden states are not finite"
_SHORTEST_NORM = 1e-12


class Pooler:
    """Pools the rows of each step as their parameters say. Keeps sums and states of prompts that are not complete."""

    def __init__(self, forward: ForwardRunner, plan: PoolingPlan | None = None) -> None:
        """plan: in place of the model's own."""
        self._forward = forward
        self._plan = plan or forward.model.pooling
        self._requests: dict[int, RequestKey] = {}  # of pooled rows
        self._partial: dict[RequestKey, np.ndarray] = {}  # by request; see `_collect`

    @property
    def kind(self) -> PoolingKind:
        return self._plan.kind

    def apply(self, output: SchedulerOutput) -> None:
        """Note the rows of new requests; drop what is kept of those that have ended."""
        for request in output.finished:
            self._partial.pop(request, None)
        for init in output.admitted:
            if init.pooling is not None:
                self._requests[init.row] = init.key

    def run(
        self,
        chunks: Sequence[PooledChunk],
        pooling: Sequence[PoolingParams | None],
        hidden: torch.Tensor,
        adapters: np.ndarray | None = None,
        queries: CrossQueries | None = None,
    ) -> tuple[dict[int, np.ndarray], dict[int, str]]:
        """Return the results of the rows whose prompts end in this step, and the errors of those that have none.

        pooling: parameters by row.   hidden: [n, hidden size], the states that the chunks need, in their order.
        adapters: int32, the slot of each row's adapter; None if no row of the step has one.
        queries: of the same tokens, if some are to be aligned.
        A result is float32: [size] of an embedding, [labels] of a class; of tasks per token, [prompt tokens, size or
        labels]; of an alignment, [tokens, encoder tokens].
        """
        pooled: dict[int, np.ndarray] = {}
        failed: dict[int, str] = {}
        at = 0
        for chunk in chunks:
            params = pooling[chunk.row]
            assert params is not None
            alignment = params.alignment
            if queries is not None and alignment is not None:
                states = queries.kept(at, chunk.count, alignment)
            else:
                states = hidden[at : at + chunk.count].float().cpu().numpy()
            at += chunk.count
            vectors = self._collect(chunk, params, states)
            if not chunk.ends:
                continue
            if not np.isfinite(vectors).all():
                failed[chunk.row] = NOT_FINITE
                continue
            if queries is not None and alignment is not None:
                pooled[chunk.row] = queries.matrix(vectors, at - 1, alignment)
                continue
            pooled[chunk.row] = self._finish(
                vectors, params, hidden, 0 if adapters is None else int(adapters[chunk.row])
            )
        return pooled, failed

    def _collect(self, chunk: PooledChunk, params: PoolingParams, states: np.ndarray) -> np.ndarray:
        """Add the chunk's states to those of earlier chunks.

        Return what the head takes, float32 [1 or prompt tokens, hidden size], once the prompt ends. Kept until then:
        the sum of a mean, float64 [hidden size], or the states themselves, float32.
        """
        request = self._requests[chunk.row]
        kept = None if chunk.begins else self._partial.pop(request, None)
        if params.task not in PER_TOKEN and self._plan.kind is PoolingKind.MEAN:
            kept = add_in_order(kept, states)
            result = (kept / (chunk.first + chunk.count)).astype(np.float32)[None] if chunk.ends else kept
        else:
            result = kept = states if kept is None else np.concatenate([kept, states])
        if not chunk.ends:
            self._partial[request] = kept.copy() if kept is states else kept
        return result

    def _finish(self, vectors: np.ndarray, params: PoolingParams, hidden: torch.Tensor, adapter: int) -> np.ndarray:
        """Apply the head and what the request asked for to one request's vectors, float32 [n, hidden size].

        adapter: its slot, 0 for none.
        """
        given = torch.from_numpy(vectors).to(hidden.device)
        slots = torch.full((len(vectors),), adapter, dtype=torch.int32, device=hidden.device) if adapter else None
        if params.task in ("classify", "score", "token_classify"):
            logits = self._forward.classify(given.to(hidden.dtype), slots).float().cpu().numpy()
            scores = logits.copy() if params.use_activation is False else activate(logits, self._plan.label_activation)
            return scores if params.task == "token_classify" else scores[0]
        found = self._forward.embed(given, hidden.dtype, slots).float().cpu().numpy()[:, : params.dimensions]
        normalize = params.normalize if params.normalize is not None else params.use_activation
        if normalize is None:
            normalize = self._plan.normalize
        found = normalized(found) if normalize else found.copy()  # the model's buffers are used again
        return found if params.task == "token_embed" else found[0]


def add_in_order(total: np.ndarray | None, states: np.ndarray) -> np.ndarray:
    """Return total + states[0] + states[1] + ..., added in this order: float64 [n].

    total: float64 [n], None for zeros.   states: float32 [count, n].
    """
    terms = np.empty((len(states) + 1, states.shape[1]))
    terms[0] = 0.0 if total is None else total
    terms[1:] = states
    # numpy sums the first axis of a C-contiguous matrix row by row; a single column would be summed pairwise.
    return np.add.reduce(terms, axis=0) if terms.shape[1] > 1 else np.cumsum(terms, axis=0)[-1]


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Return each row divided by its length, float32 [n, size]. A row of zeros stays as it is."""
    exact = vectors.astype(np.float64)
    lengths = np.array([np.sqrt(np.dot(row, row)) for row in exact])
    return (exact / np.maximum(lengths, _SHORTEST_NORM)[:, None]).astype(np.float32)


def activate(logits: np.ndarray, activation: str) -> np.ndarray:
    """Return the outputs of a classification head as scores, float32 [n, labels].

    activation: "softmax", "sigmoid" or "identity".
    """
    exact = logits.astype(np.float64)
    if activation == "softmax":
        weights = np.exp(exact - exact.max(axis=-1, keepdims=True))
        exact = weights / weights.sum(axis=-1, keepdims=True)
    elif activation == "sigmoid":
        exact = np.where(exact >= 0, 1.0, np.exp(-np.abs(exact))) / (1.0 + np.exp(-np.abs(exact)))
    return exact.astype(np.float32)
