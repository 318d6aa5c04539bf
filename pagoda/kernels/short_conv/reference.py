"""The definition of a short causal convolution."""

from itertools import pairwise

import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: KVLayer, metadata: AttentionMetadata
) -> torch.Tensor:
    """See ForwardOps.short_conv."""
    num_taps, dim = weight.shape
    x, block_size = x.reshape(-1, dim), metadata.block_size
    out = torch.empty_like(x)
    starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for row, ((first, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        num_new, blocks = end - first, metadata.block_table[row].tolist()
        start = length - num_new
        if not num_new:
            continue
        before = x.new_zeros(num_taps - 1, dim)
        if start and (block := blocks[(start - 1) // block_size]):
            before = states.k[block].reshape(num_taps - 1, dim)
        inputs = torch.cat((before, x[first:end]))  # of positions start - num_taps + 1 .. length - 1
        total = torch.zeros(num_new, dim, device=x.device) if bias is None else bias.float().expand(num_new, dim)
        for tap in range(num_taps):
            total = total + weight[tap].float() * inputs[tap : tap + num_new].float()
        out[first:end] = total.to(x.dtype)
        for index in range(start // block_size, (length - 1) // block_size + 1):
            done = min((index + 1) * block_size, length) - start
            if blocks[index]:
                states.k[blocks[index]] = inputs[done : done + num_taps - 1].unsqueeze(1)
    return out
