"""The definition of the recurrent ops: in float32, rounded once; states token by token.

A token's numbers are computed by themselves: torch's functions give an element other bits in tensors of other shapes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from pagoda.kernels.batch import AttentionMetadata, KVLayer

Step = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(state [H, K, V], token of the batch) -> the state after the token, and what the token gives, [H, V]."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row's new tokens and the blocks of its states.

    first, end: tokens of the batch.   before: block of the state that the row goes on from, 0 for zeros.
    blocks: (tokens done, block), where a state is left.
    """

    first: int
    end: int
    before: int
    blocks: tuple[tuple[int, int], ...]


def state_rows(metadata: AttentionMetadata) -> Iterator[StateRow]:
    """Yield the rows that have new tokens, in order."""
    size = metadata.block_size
    starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for row, ((first, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        start, blocks = length - (end - first), metadata.block_table[row].tolist()
        if start == length:
            continue
        before = blocks[(start - 1) // size] if start else 0
        touched = range(start // size, (length - 1) // size + 1)
        left = ((min((index + 1) * size, length) - start, blocks[index]) for index in touched)
        yield StateRow(first, end, before, tuple((done, block) for done, block in left if block))


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: KVLayer,
    metadata: AttentionMetadata,
    silu: bool = False,
) -> torch.Tensor:
    """See ForwardOps.short_conv."""
    num_taps, dim = weight.shape
    x = x.reshape(-1, dim)
    out = torch.empty_like(x)
    for row in state_rows(metadata):
        num_new = row.end - row.first
        before = states.k[row.before].reshape(-1, dim) if row.before else x.new_zeros(num_taps - 1, dim)
        inputs = torch.cat((before, x[row.first : row.end]))
        total = torch.zeros(num_new, dim, device=x.device) if bias is None else bias.float().expand(num_new, dim)
        for tap in range(num_taps):
            total = total + weight[tap].float() * inputs[tap : tap + num_new].float()
        out[row.first : row.end] = (F.silu(total) if silu else total).to(x.dtype)
        for done, block in row.blocks:
            states.k[block] = inputs[done : done + num_taps - 1].unsqueeze(1)
    return out


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: KVLayer,
    metadata: AttentionMetadata,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> torch.Tensor:
    """See ForwardOps.mamba2."""
    num_heads, state_dim, head_dim = states.v.shape[1:]
    wide = x.flatten(1).float()
    values = wide[:, : num_heads * head_dim].reshape(-1, num_heads, head_dim)
    b, c = (of_heads(part, state_dim, num_heads) for part in wide[:, num_heads * head_dim :].chunk(2, 1))
    dt = dt.flatten(1).float()

    def step(state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = F.softplus(dt[t] + dt_bias).clamp(dt_min, dt_max)
        decay = torch.exp(rate * size)
        scaled = size[:, None] * values[t]
        state = decay[:, None, None] * state + b[t, :, :, None] * scaled[:, None]
        return state, (c[t, :, :, None] * state).sum(1) + d[:, None] * values[t]

    return scan(step, x, states.v, metadata)


def gated_delta(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    states: KVLayer,
    metadata: AttentionMetadata,
    tiled: bool = False,
) -> torch.Tensor:
    """See ForwardOps.gated_delta."""
    num_heads, key_dim, value_dim = states.v.shape[1:]
    wide = x.flatten(1).float()
    first_value = wide.shape[1] - num_heads * value_dim
    values = wide[:, first_value:].reshape(-1, num_heads, value_dim)
    queries, keys = (of_heads(part, key_dim, num_heads, tiled) for part in wide[:, :first_value].chunk(2, 1))
    a, b = a.flatten(1).float(), b.flatten(1).float()

    def step(state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (part[t] * torch.rsqrt(part[t].square().sum(-1, keepdim=True) + 1e-6) for part in (queries, keys))
        state = torch.exp(rate * F.softplus(a[t] + dt_bias))[:, None, None] * state
        found = (k[:, :, None] * state).sum(1)
        state = state + k[:, :, None] * (torch.sigmoid(b[t])[:, None] * (values[t] - found))[:, None]
        return state, (q[:, :, None] * key_dim**-0.5 * state).sum(1)

    return scan(step, x, states.v, metadata)


def of_heads(x: torch.Tensor, dim: int, num_heads: int, tiled: bool = False) -> torch.Tensor:
    """[T, G * dim] -> [T, num_heads, dim]: each of the G groups serves as many heads, adjacent ones or every G-th."""
    groups = x.reshape(x.shape[0], -1, dim)
    times = num_heads // groups.shape[1]
    return groups.repeat(1, times, 1) if tiled else groups.repeat_interleave(times, dim=1)


def scan(step: Step, x: torch.Tensor, states: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """Return what the tokens give, [T, H * V] in x's dtype; leave the states in their blocks."""
    num_heads, _, value_dim = states.shape[1:]
    out = x.new_empty(x.shape[0], num_heads * value_dim)
    for row in state_rows(metadata):
        state = states[row.before].clone() if row.before else states.new_zeros(states.shape[1:])
        blocks = dict(row.blocks)
        for t in range(row.first, row.end):
            state, given = step(state, t)
            out[t] = given.flatten().to(x.dtype)
            if block := blocks.get(t + 1 - row.first):
                states[block] = state
    return out
