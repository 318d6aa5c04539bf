"""The definition of attention, paged and bidirectional: score a row's whole context in float32, one softmax."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias, TypeVar

import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer

At = TypeVar("At", int, torch.Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How products of queries and keys become weights; see `ForwardOps.attention`.

    bias, sinks: of q's heads.   is_latent: keys are (v, k), as in `ForwardOps.latent_attention`.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    is_latent: bool = False

    def first_seen(self, at: At) -> At:
        """Return the first position that a query at `at` sees of those up to it; less than 1 if it sees all."""
        if self.window < 0:
            return at - at % -self.window
        return at - self.window + 1 if self.window else at * 0


AttendPaged: TypeAlias = Callable[[torch.Tensor, KVLayer, AttentionMetadata, Scoring], torch.Tensor]
"""q [T, H, D] over a cache -> [T, H * D], in q's dtype."""
AttendBothWays: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, Scoring], torch.Tensor
]
"""q, k, v -> [T, H * D], in q's dtype."""


def attention_by(
    attend: AttendPaged,
    q: torch.Tensor,
    cache: KVLayer,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    first: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ForwardOps.attention`."""
    own_bias, own_sinks = (None if of is None else of[first : first + q.shape[1]] for of in (bias, sinks))
    return attend(q, cache, metadata, Scoring(scale, window, softcap, own_bias, own_sinks))


def latent_attention_by(
    attend: AttendPaged,
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    cache: KVLayer,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Compute `ForwardOps.latent_attention`."""
    return attend(torch.cat((q, q_rotated), dim=-1), cache, metadata, Scoring(scale, is_latent=True)).view(q.shape)


def bidirectional_attention_by(
    attend: AttendBothWays,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Compute `ForwardOps.bidirectional_attention`."""
    own = None if bias is None else bias[first : first + q.shape[1]]
    return attend(q, k, v, metadata, Scoring(scale, window, softcap, own))


def _attend(q: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, how: Scoring) -> torch.Tensor:
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, cache.v.shape[3], dtype=q.dtype, device=q.device)
    starts = metadata.query_start.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        first_read = max(0, how.first_seen(seq_len - (end - begin)))
        k, v = gather_context(cache, metadata.block_table[row], metadata.block_size, seq_len)
        k, v = k[:, first_read:], v[:, first_read:]
        k = torch.cat((v, k), dim=-1) if how.is_latent else k
        query_at = torch.arange(seq_len - (end - begin), seq_len, device=q.device).unsqueeze(1)
        key_at = torch.arange(first_read, seq_len, device=q.device).unsqueeze(0)
        last = query_at if metadata.last_seen is None else metadata.last_seen[begin:end].unsqueeze(1)
        hidden = (key_at > last) | (key_at < how.first_seen(query_at))
        out[begin:end] = _attend_to(q[begin:end], k, v, query_at, key_at, hidden, how)
    return out.flatten(1)


def _attend_both_ways(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, how: Scoring
) -> torch.Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for begin, end in pairwise(metadata.query_start.tolist()):
        keys, values = (x[begin:end].float().transpose(0, 1) for x in (k, v))
        at = torch.arange(end - begin, device=q.device)
        query_at, key_at = at.unsqueeze(1), at.unsqueeze(0)
        hidden = (query_at - key_at).abs() >= (how.window or len(at))
        out[begin:end] = _attend_to(q[begin:end], keys, values, query_at, key_at, hidden, how)
    return out.flatten(1)


def _attend_to(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_at: torch.Tensor,
    key_at: torch.Tensor,
    hidden: torch.Tensor,
    how: Scoring,
) -> torch.Tensor:
    """q [Q, H, D] over float32 k, v [K, C, D] -> [Q, H, D of v], in q's dtype.

    query_at, key_at: positions, [Q, 1] and [1, C].   hidden: bool [Q, C], what a query does not see.
    """
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hcd->hqc", q.float(), k) * how.scale
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.bias is not None:
        scores = scores + by_distance(how.bias, query_at, key_at)
    scores = scores.masked_fill(hidden, float("-inf"))
    if how.sinks is not None:
        scores = torch.cat((scores, how.sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    return torch.einsum("hqc,hcd->qhd", weights, v).to(q.dtype)


def by_distance(bias: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor) -> torch.Tensor:
    """Return the bias of each score, [heads, *broadcast].   query_at, key_at: positions, broadcast with each other."""
    most = bias.shape[1] // 2
    return bias[:, most + (key_at - query_at).clamp(-most, most)]


def gather_context(
    cache: KVLayer, blocks: torch.Tensor, block_size: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `seq_len` positions of one row as float32 (k, v), each [K, seq_len, D]."""
    used = blocks[: -(-seq_len // block_size)].long()
    pair: list[torch.Tensor] = []
    for pages, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        context = pages[used].float()
        if scales is not None:
            context = context * scales[used].unsqueeze(-1)
        pair.append(context.transpose(0, 1).flatten(1, 2)[:, :seq_len])
    return pair[0], pair[1]


attention = partial(attention_by, _attend)
latent_attention = partial(latent_attention_by, _attend)
bidirectional_attention = partial(bidirectional_attention_by, _attend_both_ways)
