"""Writing the paged KV cache in Triton: q and k are rotated and k and v written in one launch."""

import torch
import triton
import triton.language as tl

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.triton_support import jit, to_e4m3

_Q, _K, _V = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@jit
def _to_int8(x):
    # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
    rounded = (x + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)


@jit
def _to_codes(x, inverse, dtype: tl.constexpr):
    """Return int8, or the bits of e4m3."""
    if dtype == tl.int8:
        return _to_int8(x * inverse[:, None])
    else:
        return to_e4m3(tl.minimum(tl.maximum(x * inverse[:, None], -448.0), 448.0))


@jit
def _write_page(
    first, second, pages, scales, slot, page_stride, scale_stride, head, pair, inside, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Store the halves [heads, D / 2] of a token's vectors at its slot."""
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = pages + block * page_stride + (head * BLOCK_SIZE + offset)[:, None] * HEAD_DIM + pair[None, :]
    if QUANTIZED:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        limit = 127.0 if pages.dtype.element_ty == tl.int8 else 448.0
        inverse = tl.where(largest > 0, tl.div_rn(limit, largest), 0.0)  # `/` would not be rounded correctly
        # A maximum may ignore NaN; the scale must not.
        scale = tl.div_rn(largest, limit) + tl.sum(first * 0.0 + second * 0.0, 1)
        tl.store(scales + block * scale_stride + head * BLOCK_SIZE + offset, scale, mask=head < num_heads)
        first = _to_codes(first, inverse, pages.dtype.element_ty)
        second = _to_codes(second, inverse, pages.dtype.element_ty)
    tl.store(target, first.to(pages.dtype.element_ty), mask=inside)
    tl.store(target + HEAD_DIM // 2, second.to(pages.dtype.element_ty), mask=inside)


@jit
def _rotary_write_kv(
    q, k, v, out, positions, cos, sin, slots, k_pages, v_pages, k_scales, v_scales,
    q_stride, k_stride, v_stride, page_stride, v_page_stride, scale_stride, num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATE: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One program per token and part: q, k and v; without ROTATE, k and v."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if not ROTATE:
        part += 1
    head = tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_D)
    count = tl.where(part == _Q, num_heads, num_kv_heads)
    source = q + token * q_stride
    if part == _K:
        source = k + token * k_stride
    elif part == _V:
        source = v + token * v_stride
    inside = (head < count)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    at = head[:, None] * HEAD_DIM + pair[None, :]
    first = tl.load(source + at, mask=inside, other=0.0)
    second = tl.load(source + at + HEAD_DIM // 2, mask=inside, other=0.0)
    if part == _V:
        slot = tl.load(slots + token)
        _write_page(
            first, second, v_pages, v_scales, slot, v_page_stride, scale_stride, head, pair, inside, count,
            HEAD_DIM, BLOCK_SIZE, QUANTIZED,
        )  # fmt: skip
    else:
        if ROTATE:
            row = tl.load(positions + token).to(tl.int64) * (HEAD_DIM // 2) + pair
            row_cos = tl.load(cos + row, mask=pair < HEAD_DIM // 2, other=0.0)[None, :]
            row_sin = tl.load(sin + row, mask=pair < HEAD_DIM // 2, other=0.0)[None, :]
            x, y = first.to(tl.float32), second.to(tl.float32)
            first = (x * row_cos - y * row_sin).to(first.dtype)
            second = (y * row_cos + x * row_sin).to(second.dtype)
        if part == _Q:
            target = out + token * num_heads * HEAD_DIM + at
            tl.store(target, first, mask=inside)
            tl.store(target + HEAD_DIM // 2, second, mask=inside)
        else:
            slot = tl.load(slots + token)
            _write_page(
                first, second, k_pages, k_scales, slot, page_stride, scale_stride, head, pair, inside, count,
                HEAD_DIM, BLOCK_SIZE, QUANTIZED,
            )  # fmt: skip


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
    """See reference.rotary_write_kv."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, k, v, out, positions, cos, sin, cache, metadata, rotate=True)
    return out


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
    """See reference.write_kv."""
    nothing = metadata.slot_mapping
    _launch(k, k, v, k, nothing, k, k, cache, metadata, rotate=False)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KVLayer,
    metadata: AttentionMetadata,
    rotate: bool,
) -> None:
    q, k, v = map(adjacent_heads, (q, k, v))
    tokens, num_kv_heads, head_dim = k.shape
    num_heads = q.shape[1]
    block_h = triton.next_power_of_2(max(num_heads, num_kv_heads))
    block_d = triton.next_power_of_2(head_dim // 2)
    _rotary_write_kv[(tokens, 3 if rotate else 2)](
        q, k, v, out, positions, cos, sin, metadata.slot_mapping, *pages_of(cache),
        q.stride(0), k.stride(0), v.stride(0), *strides_of(cache),
        num_heads, num_kv_heads, head_dim, metadata.block_size, block_h, block_d, rotate, cache.k_scale is not None,
        num_warps=min(8, max(1, block_h * block_d // 512)),
    )  # fmt: skip


def pages_of(cache: KVLayer) -> tuple[torch.Tensor, ...]:
    """Return k, v, and their scales (any tensor if they have none); 8-bit floats as bytes."""
    k, v = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (cache.k, cache.v))
    return k, v, k if cache.k_scale is None else cache.k_scale, v if cache.v_scale is None else cache.v_scale


def strides_of(cache: KVLayer) -> tuple[int, int, int]:
    """Return the strides from block to block: of k, of v, and of the scales."""
    return cache.k.stride(0), cache.v.stride(0), 0 if cache.k_scale is None else cache.k_scale.stride(0)


def adjacent_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, H, D], copied unless the heads of a token are next to each other (as in a fused projection)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
