"""Alignment: where the tokens of a prompt look in what the encoder read, by the cross attention of a few heads.

A step that has such a prompt runs op by op, with ops that keep the queries of its cross attention. The keys are in the
cache. When the prompt ends, both give the weights, which are reduced to one matrix as Whisper's own code does it:
https://github.com/openai/whisper, `timing.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagoda.base.pooling import Alignment, PoolingParams
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.ops import Ops
from pagoda.worker.staging import StepInputs

_MEDIAN_OF = 7  # neighbouring encoder tokens


class _Layer(NamedTuple):
    """One layer's cross attention in a step.   queries: float32 [kept tokens, heads, dim], scaled.

    rows: int64 [kept tokens], of the metadata.
    """

    queries: torch.Tensor
    cache: KVLayer
    metadata: AttentionMetadata
    rows: torch.Tensor


class CrossQueries:
    """ForwardOps that keep the queries with which pooled tokens read the encoder's; all ops are `ops`'s own."""

    def __init__(self, ops: Ops, inputs: StepInputs, groups: Sequence[int]) -> None:
        """groups: of cross attention."""
        self._ops = ops
        outputs = inputs.batch.outputs
        in_outputs = torch.arange(len(outputs.index)) if inputs.states_index is None else inputs.states_index
        in_outputs = in_outputs.to(outputs.index.device)[sum(count for _, _, count in inputs.prompt_rows) :]
        # The last layer computes the output rows alone; where those are the whole batch, both metadata are the same.
        self._rows = {id(inputs.batch.metadata[group]): outputs.index[in_outputs] for group in groups}
        self._rows |= {id(outputs.metadata[group]): in_outputs for group in groups}
        self._layers: list[_Layer] = []

    @classmethod
    def of(
        cls, ops: Ops, inputs: StepInputs, pooling: Sequence[PoolingParams | None], groups: Sequence[int]
    ) -> "CrossQueries | None":
        """Return them for a step that has tokens to align, else None.   pooling: parameters by row."""
        each = (pooling[chunk.row] for chunk in inputs.pooled)
        aligns = any(params is not None and params.alignment is not None for params in each)
        return cls(ops, inputs, groups) if aligns else None

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def attention(
        self, q: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, scale: float, *more: object
    ) -> torch.Tensor:
        rows = self._rows.get(id(metadata))
        if rows is not None:
            self._layers.append(_Layer(q[rows].float() * scale, cache, metadata, rows))
        return self._ops.attention(q, cache, metadata, scale, *more)  # type: ignore[arg-type]

    def kept(self, begin: int, count: int, alignment: Alignment) -> np.ndarray:
        """Return those of some of the kept tokens: float32 [count, heads * dim]."""
        each = [self._layers[layer].queries[begin : begin + count, head] for layer, head in alignment.heads]
        return torch.cat(each, dim=1).cpu().numpy()

    def matrix(self, queries: np.ndarray, at: int, alignment: Alignment) -> np.ndarray:
        """Return how much each token of a prompt looks at each encoder token: float32 [tokens, encoder tokens].

        queries: of the whole prompt, float32 [tokens, heads * dim].   at: a kept token of it.
        """
        keys = {layer: self._keys(layer, at) for layer in {layer for layer, _ in alignment.heads}}
        each = np.split(queries[alignment.first :], len(alignment.heads), axis=1)
        total = torch.zeros(())
        for (layer, head), of_head in zip(alignment.heads, each, strict=True):
            weights = (torch.from_numpy(of_head) @ keys[layer][head].T).softmax(-1)
            total = total + emphasised(weights[:, : alignment.num_frames])
        return (total / len(alignment.heads)).numpy()

    def _keys(self, layer: int, at: int) -> torch.Tensor:
        """Return the keys of all encoder tokens of a prompt, float32 [heads, encoder tokens, dim]."""
        _, cache, metadata, rows = self._layers[layer]
        row = int(rows[at])
        num_keys = int(metadata.seq_lens[row])
        used = metadata.block_table[row][: -(-num_keys // metadata.block_size)].long()
        keys = self._ops.plain_keys(cache.k[used]).float()
        if cache.k_scale is not None:
            keys = keys * cache.k_scale[used].unsqueeze(-1)
        return keys.transpose(0, 1).flatten(1, 2)[:, :num_keys].cpu()


def emphasised(weights: torch.Tensor) -> torch.Tensor:
    """Return one head's weights [tokens, encoder tokens] relative to those of the other tokens, and smoothed."""
    std, mean = torch.std_mean(weights, dim=0, correction=0, keepdim=True)
    return median_filter((weights - mean) / std.clamp_min(torch.finfo(weights.dtype).tiny))


def median_filter(x: torch.Tensor) -> torch.Tensor:
    """Return the median of each element and its neighbours on both sides, which are mirrored at the ends: [rows, n].

    Fewer elements than a side has neighbours stay as they are.
    """
    side = _MEDIAN_OF // 2
    if x.shape[1] <= side:
        return x
    padded = torch.nn.functional.pad(x, (side, side), mode="reflect")
    sorted_ = [padded[:, at : at + x.shape[1]] for at in range(_MEDIAN_OF)]
    # Neighbours exchange, odd and even pairs in turn: as many rounds as there are elements sort them.
    for begin in range(_MEDIAN_OF):
        for at in range(begin % 2, _MEDIAN_OF - 1, 2):
            low, high = sorted_[at : at + 2]
            sorted_[at : at + 2] = torch.minimum(low, high), torch.maximum(low, high)
    return sorted_[side]
