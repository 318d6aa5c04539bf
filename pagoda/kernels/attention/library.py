"""Attention in plain torch: paged, one chunk of the context at a time, without copying a whole context; bidirectional,
one chunk of queries at a time.
"""

from functools import partial

import torch

from pagoda.kernels.attention.reference import (
    Scoring,
    attention_by,
    bidirectional_attention_by,
    by_distance,
    latent_attention_by,
)
from pagoda.kernels.batch import AttentionMetadata, KVLayer

CHUNK_TOKENS = 512
"""Context positions that are gathered and scored at once."""

CHUNK_SCORES = 1 << 22
"""Scores per head that bidirectional attention holds at once."""


def _attend_paged(q: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, how: Scoring) -> torch.Tensor:
    """Compute rows with the same number of new tokens together."""
    out = torch.empty(*q.shape[:2], cache.v.shape[3], dtype=q.dtype, device=q.device)
    for rows, tokens in _rows_by_query_len(metadata):
        seen = None if metadata.last_seen is None else metadata.last_seen[tokens]
        out[tokens] = _attend(q[tokens], cache, metadata, rows, seen, how).to(q.dtype)
    return out.view(q.shape[0], -1)


def _attend_bidirectionally(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, how: Scoring
) -> torch.Tensor:
    """Compute rows of one length together."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    window = how.window
    for _, tokens in _rows_by_query_len(metadata):
        length = tokens.shape[1]
        queries = min(length, max(1, CHUNK_SCORES // length))
        for some in tokens.split(max(1, CHUNK_SCORES // (queries * length))):
            for begin in range(0, length, queries):
                end = min(length, begin + queries)
                low, high = (max(0, begin - window + 1), min(length, end + window - 1)) if window else (0, length)
                keys = some[:, low:high]
                part = _attend_both_ways(q[some[:, begin:end]], k[keys], v[keys], begin - low, how)
                out[some[:, begin:end]] = part.to(q.dtype)
    return out.view(q.shape[0], -1)


def _attend_both_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, how: Scoring) -> torch.Tensor:
    """q [R, Q, H, D] over k, v [R, C, K, D] -> float32 [R, Q, H, D].   offset: of the first query among the keys."""
    num_rows, query_len, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    # [R, K, G, Q, D]: the G query heads of one KV head are scored together.
    grouped = q.float().view(num_rows, query_len, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4) * how.scale
    keys, values = (x.float().transpose(1, 2).unsqueeze(2) for x in (k, v))
    scores = grouped @ keys.transpose(-1, -2)
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    query_at = (offset + torch.arange(query_len, device=q.device)).unsqueeze(1)
    key_at = torch.arange(k.shape[1], device=q.device)
    if how.bias is not None:
        scores += by_distance(how.bias, query_at, key_at).unflatten(0, (num_kv_heads, -1))
    if how.window:
        scores.masked_fill_((query_at - key_at).abs() >= how.window, float("-inf"))
    attended = scores.softmax(dim=-1) @ values
    return attended.permute(0, 3, 1, 2, 4).reshape(num_rows, query_len, num_heads, head_dim)


def _rows_by_query_len(metadata: AttentionMetadata) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (rows int64 [R], tokens int64 [R, Q]) for each number Q of new tokens in the batch."""
    device = metadata.seq_lens.device
    num_rows = metadata.seq_lens.shape[0]
    if metadata.max_query_len == 1:
        every = torch.arange(num_rows, device=device)
        return [(every, metadata.query_start[:-1].long().unsqueeze(1))]
    query_lens = metadata.query_start.diff()
    groups: list[tuple[torch.Tensor, torch.Tensor]] = []
    for query_len in query_lens.unique().tolist():
        if query_len:
            rows = (query_lens == query_len).nonzero().squeeze(1)
            first = metadata.query_start[rows].long().unsqueeze(1)
            groups.append((rows, first + torch.arange(query_len, device=device)))
    return groups


def _attend(
    q: torch.Tensor,
    cache: KVLayer,
    metadata: AttentionMetadata,
    rows: torch.Tensor,
    seen: torch.Tensor | None,
    how: Scoring,
) -> torch.Tensor:
    """Online softmax over chunks of context. q [R, Q, H, D] -> float32 [R, Q, H, D].

    seen: `last_seen`, [R, Q].
    """
    num_rows, query_len, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[1]
    seq_lens = metadata.seq_lens[rows].long()
    query_at = (seq_lens - query_len).unsqueeze(1) + torch.arange(query_len, device=q.device)
    # [R, K, Q * G, D]: the G query heads of one KV head are scored together.
    grouped = q.view(num_rows, query_len, num_kv_heads, -1, head_dim).permute(0, 2, 1, 3, 4)
    group = grouped.shape[3]
    grouped = grouped.reshape(num_rows, num_kv_heads, query_len * group, head_dim).float() * how.scale
    top = torch.full((*grouped.shape[:3], 1), float("-inf"), device=q.device)
    total = torch.zeros_like(top)
    value_dim = cache.v.shape[3]
    acc = torch.zeros(*grouped.shape[:3], value_dim, device=q.device)
    last = int(seq_lens.max()) if num_rows < metadata.seq_lens.shape[0] else metadata.max_seq_len
    first = max(0, how.first_seen(int(seq_lens.min()) - query_len)) if how.window else 0
    for start in range(first - first % CHUNK_TOKENS, last, CHUNK_TOKENS):
        k, v = _gather_chunk(cache, metadata, rows, start, min(CHUNK_TOKENS, last - start))
        key_at = torch.arange(start, start + k.shape[2], device=q.device)
        hidden = key_at > (query_at if seen is None else seen).unsqueeze(-1)
        if how.window:
            hidden |= key_at < how.first_seen(query_at).unsqueeze(-1)
        k = torch.cat((v, k), dim=-1) if how.is_latent else k
        # 0 * NaN is NaN: values that no query of the row may see must not enter the product.
        v = v.masked_fill(hidden.all(dim=1)[:, None, :, None], 0.0)
        scores = grouped @ k.transpose(-1, -2)
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.bias is not None:  # [H, R, Q, C] -> [R, K, Q * G, C]
            added = by_distance(how.bias, query_at.unsqueeze(-1), key_at).unflatten(0, (num_kv_heads, group))
            scores += added.permute(2, 0, 3, 1, 4).flatten(2, 3)
        scores.masked_fill_(hidden.repeat_interleave(group, dim=1).unsqueeze(1), float("-inf"))
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        # A query without any visible position so far keeps top = -inf; its weights must be 0, not NaN.
        shift = new_top.nan_to_num(neginf=0.0)
        weights = torch.exp(scores - shift)
        keep = torch.exp(top - shift)
        total = total * keep + weights.sum(dim=-1, keepdim=True)
        acc = acc * keep + weights @ v
        top = new_top
    if how.sinks is not None:
        of_heads = how.sinks.float().view(num_kv_heads, 1, group).expand(-1, query_len, -1).reshape(num_kv_heads, -1, 1)
        total = total + torch.exp(of_heads - top)
    out = (acc / total).view(num_rows, num_kv_heads, query_len, group, value_dim)
    return out.permute(0, 2, 1, 3, 4).reshape(num_rows, query_len, num_heads, value_dim)


def _gather_chunk(
    cache: KVLayer, metadata: AttentionMetadata, rows: torch.Tensor, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions start .. start + length - 1 of each row as float32 k, v [R, K, length, D]; junk past the end."""
    positions = torch.arange(start, start + length, device=rows.device)
    blocks = metadata.block_table[rows][:, positions // metadata.block_size].long()
    offsets = (positions % metadata.block_size).expand_as(blocks)
    pair: list[torch.Tensor] = []
    for pages, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        chunk = pages[blocks, :, offsets].float()
        if scales is not None:
            chunk = chunk * scales[blocks, :, offsets].unsqueeze(-1)
        pair.append(chunk.transpose(1, 2))
    return pair[0], pair[1]


attention = partial(attention_by, _attend_paged)
latent_attention = partial(latent_attention_by, _attend_paged)
bidirectional_attention = partial(bidirectional_attention_by, _attend_bidirectionally)
