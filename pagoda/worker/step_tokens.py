"""StepTokens: the tokens that a step computes, gathered on the host, with numpy operations and no loop over rows."""

from dataclasses import dataclass, replace

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.decode_inputs import PaddedSize
from pagoda.worker.queries import Queries
from pagoda.worker.table_mirror import TableMirror


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """The tokens of all rows of a step, one row after the other.

    rows: [num_tokens], the table row of each.   token_ids, positions: int32 [num_tokens].
    slots: per KV group, int64 [num_tokens], where their keys and values are written.
    queries: where rows begin, and what they attend to.   block_size: of the KV cache.
    max_query_len: most tokens of a row.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slots: list[np.ndarray]
    queries: Queries
    block_size: int
    max_query_len: int

    @property
    def is_decode(self) -> bool:
        """Whether each row has one token."""
        return self.max_query_len == 1

    @classmethod
    def gather(cls, table: TableMirror, output: SchedulerOutput) -> "StepTokens":
        """Gather the tokens of `output`, which must not be empty and must have been applied to `table`."""
        rows = output.rows
        # Kernels read raw int32 memory.
        start, num_new = output.start.astype(np.int32, copy=False), output.num_new.astype(np.int32, copy=False)
        num_rows, block_size = len(rows), table.block_size
        query_start = np.zeros(num_rows + 1, np.int32)
        np.cumsum(num_new, out=query_start[1:])
        seq_lens = start + num_new
        max_query_len = int(num_new.max())
        if max_query_len == 1:
            row_of_token, at_row = rows, np.arange(num_rows)
            positions = np.array(start)  # a copy: the scheduler's own array may be a strided view
        else:
            row_of_token, at_row = np.repeat(rows, num_new), np.repeat(np.arange(num_rows), num_new)
            positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(start - query_start[:-1], num_new)
        num_blocks = -(-int(seq_lens.max()) // block_size)
        block, offset = np.divmod(positions, block_size)
        tables = [block_table[rows, :num_blocks] for block_table in table.block_tables]
        slots = [of_rows[at_row, block].astype(np.int64) * block_size + offset for of_rows in tables]
        if not tables:  # a model without KV still needs to know where rows begin
            tables, slots = [np.zeros((num_rows, 1), np.int32)], [np.zeros(1, np.int64)]
        token_ids = table.token_ids[row_of_token, positions]
        queries = Queries(query_start, seq_lens, tables)
        return cls(row_of_token, token_ids, positions, slots, queries, block_size, max_query_len)

    def with_shared_prefixes(self, start: np.ndarray) -> "StepTokens":
        """Return the same with the prefixes that rows share.   start: tokens of each row in the cache."""
        return replace(self, queries=self.queries.with_shared_prefixes(start, self.block_size))

    def padded(self, size: PaddedSize) -> "StepTokens":
        """Return the same with padding tokens and rows: see Queries.padded. `rows` stay as they are."""
        further = np.arange(size.num_tokens - len(self.positions), dtype=np.int32) % size.max_query_len
        return replace(
            self,
            token_ids=with_zeros(self.token_ids, size.num_tokens),
            positions=np.concatenate([self.positions, further]),
            slots=[with_zeros(of_group, size.num_tokens) for of_group in self.slots],
            queries=self.queries.padded(size, self.block_size),
        )


def with_zeros(array: np.ndarray, length: int) -> np.ndarray:
    """Return `array` [n] with zeros after it: [length]."""
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer
