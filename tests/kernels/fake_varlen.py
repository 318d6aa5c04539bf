"""torch's `varlen_attn` with a block table, as torch 2.13 documents it, computed in plain torch."""

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """query [T, H, D]; key and value [num_pages, page_size, K, D]; seqused_k [N]; block_table [N, pages]."""
    assert cu_seq_k is None, "the lengths are seqused_k"
    assert scale is not None
    assert seqused_k is not None
    assert block_table is not None
    assert return_aux is num_splits is None
    for tensor in (cu_seq_q, seqused_k, block_table):
        assert tensor.dtype == torch.int32
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(seqused_k.max()) <= max_k
    assert key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
    num_heads, num_kv_heads, page_size = query.shape[1], key.shape[2], key.shape[1]
    assert enable_gqa or num_heads == num_kv_heads
    left, right = window_size
    assert right == 0, "causal"
    out = torch.empty_like(query)
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        pages = block_table[row, : -(-length // page_size)].long()
        at, key_at = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
        visible = key_at <= at if left < 0 else (key_at <= at) & (key_at >= at - left)
        for head in range(num_heads):
            of_kv = head * num_kv_heads // num_heads
            k, v = (each[pages, :, of_kv].reshape(-1, query.shape[2])[:length].float() for each in (key, value))
            scores = query[begin:end, head].float() @ k.T * scale
            out[begin:end, head] = (scores.where(visible, -torch.inf).softmax(1) @ v).to(query.dtype)
    return out
