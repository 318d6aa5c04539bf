"""Paged caches of awkward shapes, filled step by step through any Ops."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer


@dataclass(frozen=True)
class Geometry:
    """Shapes of one attention problem.   latent: size of V in latent attention, where it is part of a key, too."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    int8_cache: bool = False
    fp8_cache: bool = False
    latent: int = 0

    def new_cache(self, num_blocks: int) -> KVLayer:
        """Zeroed, as the cache engine makes it."""
        shape = (num_blocks + 1, self.num_kv_heads, self.block_size, self.head_dim)
        if not self.int8_cache and not self.fp8_cache:
            of_v = (*shape[:3], self.latent or self.head_dim)
            return KVLayer(torch.zeros(shape, dtype=self.dtype), torch.zeros(of_v, dtype=self.dtype))
        codes = torch.int8 if self.int8_cache else torch.float8_e4m3fn
        return KVLayer(
            torch.zeros(shape, dtype=codes),
            torch.zeros(shape, dtype=codes),
            torch.zeros(shape[:3]),
            torch.zeros(shape[:3]),
        )


@dataclass(frozen=True)
class Sequence:
    """One row's whole K, V and Q, [length, heads, head_dim] each, from which any chunking can be cut."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, geometry: Geometry, length: int, seed: int) -> "Sequence":
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int = geometry.head_dim) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=generator).to(geometry.dtype)

        v_dim, heads = geometry.latent or geometry.head_dim, geometry.num_kv_heads
        return cls(draw(geometry.num_heads, geometry.latent + geometry.head_dim) * 2, draw(heads), draw(heads, v_dim))


def make_metadata(geometry: Geometry, lens: list[tuple[int, int]], tables: list[list[int]]) -> AttentionMetadata:
    """Metadata of rows with (num_computed, num_new) tokens and the given blocks."""
    table = torch.zeros(len(lens), max(map(len, tables)), dtype=torch.int32)
    slots: list[int] = []
    for row, ((computed, new), blocks) in enumerate(zip(lens, tables, strict=True)):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(computed, computed + new):
            slots.append(blocks[position // geometry.block_size] * geometry.block_size + position % geometry.block_size)
    starts = torch.tensor([0, *(new for _, new in lens)], dtype=torch.int32).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([sum(pair) for pair in lens], dtype=torch.int32)
    return AttentionMetadata(
        query_start=starts,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=geometry.block_size,
        max_query_len=max(new for _, new in lens),
        max_seq_len=int(seq_lens.max()),
    )


class PagedRows:
    """Rows over one cache, fed to an implementation step by step; blocks come from a shuffled pool."""

    def __init__(
        self, ops: Any, geometry: Geometry, rows: list[Sequence], seed: int = 0, sinks: torch.Tensor | None = None
    ) -> None:
        """sinks: of two heads in front of those of the rows, and of theirs; None for attention without."""
        self.ops, self.sinks = ops, sinks
        self.geometry = geometry
        self.rows = rows
        counts = [-(-len(row.q) // geometry.block_size) for row in rows]
        order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        self.cache = geometry.new_cache(sum(counts))
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.computed = [0] * len(rows)

    def step(
        self,
        new: list[tuple[int, int]],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        last_seen: list[int] | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute (row, tokens) each, in this order; returns the attention output [T, H * D]."""
        lens = [(self.computed[row], count) for row, count in new]
        metadata = make_metadata(self.geometry, lens, [self.tables[row] for row, _ in new])
        if last_seen is not None:
            metadata = replace(metadata, last_seen=torch.tensor(last_seen, dtype=torch.int32))
        parts = [self.rows[row] for row, _ in new]
        cuts = [slice(start, start + count) for start, count in lens]
        q = torch.cat([part.q[cut] for part, cut in zip(parts, cuts, strict=True)])
        k = torch.cat([part.k[cut] for part, cut in zip(parts, cuts, strict=True)])
        v = torch.cat([part.v[cut] for part, cut in zip(parts, cuts, strict=True)])
        self.ops.write_kv(k, v, self.cache, metadata)
        for row, count in new:
            self.computed[row] += count
        if self.geometry.latent:
            q, rotated = q.split((self.geometry.latent, self.geometry.head_dim), dim=-1)
            return self.ops.latent_attention(q.contiguous(), rotated.contiguous(), self.cache, metadata, scale).flatten(
                1
            )
        first = 0 if bias is None and self.sinks is None else 2
        return self.ops.attention(q, self.cache, metadata, scale, window, softcap, bias, first, self.sinks)
