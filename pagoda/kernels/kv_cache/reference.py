"""The definition of writing KV pages, and of their forms in 8 bits."""

import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.linear.quantize import quantize_vectors, scaled_to
from pagoda.kernels.rotary.reference import rotary


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
    """Write k, v [T, K, D] at `slot_mapping`; a cache of 8 bits gets one scale per token and head."""
    block = metadata.slot_mapping // metadata.block_size
    offset = metadata.slot_mapping % metadata.block_size
    for new, pages, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if scales is None:
            pages[block, :, offset] = new.to(pages.dtype)
        else:
            pages[block, :, offset], scales[block, :, offset] = QUANTIZERS[pages.dtype](new)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K, D] -> (int8 [T, K, D], float32 scale [T, K]): symmetric, largest magnitude becomes 127, ties to even."""
    values, scales = scaled_to(x, 127.0)
    return values.round().clamp(-127, 127).to(torch.int8), scales


QUANTIZERS = {torch.int8: quantize_int8, torch.float8_e4m3fn: quantize_vectors}
"""By the type of the pages, what makes codes and scales of K and V."""


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
