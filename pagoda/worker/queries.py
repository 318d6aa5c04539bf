"""Queries: where the rows of a step begin and what they attend to, on the host."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.kernels.attention.shared_prefix import find_shared_prefix
from pagoda.kernels.batch import AttentionMetadata
from pagoda.worker.decode_inputs import PaddedSize


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """The queries of attention of a step, or of its tail: see AttentionMetadata.

    tables: a block table per KV group.   shared: the shared prefix of each group, 0 tokens if it has none; empty if
    no group has one.   size: of a batch that is recorded, whose replays have other values; else None.
    """

    query_start: np.ndarray
    seq_lens: np.ndarray
    tables: list[np.ndarray]
    shared: tuple[np.ndarray, ...] = ()
    size: PaddedSize | None = None

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.query_start, self.seq_lens, *self.tables, *self.shared]

    def with_shared_prefixes(self, context: np.ndarray, block_size: int) -> "Queries":
        """Return the same with the prefixes that rows share.   context: tokens in the cache before this step."""
        found = [find_shared_prefix(table, context, block_size) for table in self.tables]
        if not any(found):
            return self
        return replace(self, shared=tuple(np.array(prefix or (0, 0), np.int32) for prefix in found))

    def padded(self, size: PaddedSize, block_size: int) -> "Queries":
        """Return the same, to be recorded: with more rows, and tables for more tokens.

        Padding tokens belong to padding rows at the end, which write to the null block; some of these have no tokens.
        """
        count, num_blocks = len(self.seq_lens), -(-size.context // block_size)
        num_tokens, longest = int(self.query_start[-1]), size.max_query_len
        further = size.num_tokens - num_tokens - longest * np.arange(size.num_rows - count, dtype=np.int32)
        further = np.clip(further, 0, longest)
        query_start = np.concatenate([self.query_start, num_tokens + np.cumsum(further, dtype=np.int32)])
        tables = [np.zeros((size.num_rows, num_blocks), np.int32) for _ in self.tables]
        for table, of_rows in zip(tables, self.tables, strict=True):
            table[:count, : of_rows.shape[1]] = of_rows
        return Queries(query_start, np.concatenate([self.seq_lens, further]), tables, self.shared, size)

    def metadata(
        self, slots: list[torch.Tensor], tensors: list[torch.Tensor], block_size: int
    ) -> tuple[AttentionMetadata, ...]:
        """slots: of the whole batch, per KV group.   tensors: `arrays`, on the device."""
        if self.size is None:
            longest, furthest = int(np.diff(self.query_start).max()), int(self.seq_lens.max())
        else:
            longest, furthest = self.size.max_query_len, self.size.context
        query_start, seq_lens, *tables = tensors
        count = len(self.tables)
        shared = tables[count:] if self.shared else [None] * count
        return tuple(
            AttentionMetadata(query_start, seq_lens, table, of_group, block_size, longest, furthest, prefix)
            for of_group, table, prefix in zip(slots, tables[:count], shared, strict=True)
        )

    def tail(self, logits_index: np.ndarray) -> tuple["Queries", np.ndarray]:
        """Return the queries of the shortest row ends that contain `logits_index`, and their batch indices (int64).

        They have at least one token, so that the forward pass needs no special case for an empty tail.
        """
        start = self.query_start
        wanted = np.zeros(len(start) - 1, np.int32)
        if logits_index.size:
            row = np.searchsorted(start, logits_index, side="right") - 1
            np.maximum.at(wanted, row, (start[row + 1] - logits_index).astype(np.int32))
        else:
            wanted[-1] = 1
        rows = np.flatnonzero(wanted)
        tail_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(wanted[rows], out=tail_start[1:])
        shift = start[rows + 1] - tail_start[1:]  # index in the batch minus index in the tail
        index = np.arange(tail_start[-1], dtype=np.int64) + np.repeat(shift, wanted[rows])
        return Queries(tail_start, self.seq_lens[rows], [table[rows] for table in self.tables]), index
