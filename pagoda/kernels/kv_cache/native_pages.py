"""The layout of pages that the compiled CPU kernels write (pages.h), read with torch."""

import torch


def plain_keys(pages: torch.Tensor) -> torch.Tensor:
    """See CacheOps.plain_keys."""
    num_blocks, num_heads, block_size, dim = pages.shape
    pair = 1 if pages.dtype in (torch.float32, torch.float16) else 2  # adjacent dimensions, then the slots
    return pages.view(num_blocks, num_heads, dim // pair, block_size, pair).transpose(2, 3).reshape(pages.shape)
