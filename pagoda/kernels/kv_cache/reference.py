"""The definition of writing KV pages, of their int8 form, and of copying blocks."""

from collections.abc import Sequence

import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.rotary.reference import rotary


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
    """Write k, v [T, K, D] at `slot_mapping`; an int8 cache gets one scale per token and head."""
    block = metadata.slot_mapping // metadata.block_size
    offset = metadata.slot_mapping % metadata.block_size
    for new, pages, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if scales is None:
            pages[block, :, offset] = new.to(pages.dtype)
        else:
            pages[block, :, offset], scales[block, :, offset] = quantize_kv(new)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K, D] -> (int8 [T, K, D], float32 scale [T, K]): symmetric, largest magnitude becomes 127, ties to even."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
    return (wide * inverse.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), largest / 127.0


def copy_blocks(cache: KVLayer, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination), one pair after the other."""
    tensors = [t for t in (cache.k, cache.v, cache.k_scale, cache.v_scale) if t is not None]
    for source, destination in pairs:
        for tensor in tensors:
            tensor[destination] = tensor[source]


def rotary_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KVLayer,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """`rotary`, then `write_kv` of the rotated k; return the rotated q."""
    q, k = rotary(q, k, positions, cos, sin)
    write_kv(k, v, cache, metadata)
    return q
