"""The rows of a step on the host: where each begins, what it attends to, and to which size a step is padded.

On a GPU, steps of few tokens are padded to few sizes, so that each is the replay of a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.attention.shared_prefix import find_shared_prefix
from pagoda.kernels.batch import AttentionMetadata
from pagoda.worker.table_mirror import TableMirror

_SHORTEST_CONTEXT = 1024  # tokens: shorter contexts share a graph
_MOST_TOKENS = 512
_MOST_CHUNK_TOKENS = 1024  # of a step with parts of prompts: a GPU computes more for longer than a host launches
_TOKEN_BYTES = 256  # per token of a padded step, not counting its slots and block tables
_SPARE_BYTES = 4096


class PaddedSize(NamedTuple):
    """The size to which a step is padded.

    max_query_len: no row has more new tokens.   context: tokens of the longest sequence.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    context: int

    @property
    def gives_all_logits(self) -> bool:
        """Whether every token gives logits: of many tokens of a prompt, they would take much memory for nothing."""
        return self.max_query_len == 1


class Padding:
    """Which steps are padded, and to which size: those of few tokens."""

    def __init__(self, max_rows: int, max_model_len: int, max_query_len: int = 1) -> None:
        """max_rows: of the scheduler's table.   max_model_len: longest sequence, with positions past its end.

        max_query_len: most new tokens of a row that is no part of a prompt: one and its drafts.
        """
        most = max_rows * max_query_len
        self._most_tokens = min(max(padded_rows(most), padded_tokens(most)), _MOST_TOKENS)
        self._longest = max_model_len
        self._max_query_len = max_query_len

    def size_of(self, num_rows: int, num_tokens: int, max_query_len: int, seq_len: int) -> PaddedSize | None:
        """Return the size to which a step is padded; None: it is not.

        max_query_len: most new tokens of a row.   seq_len: tokens of the longest sequence.
        """
        has_chunks = max_query_len > self._max_query_len
        if num_tokens > (_MOST_CHUNK_TOKENS if has_chunks else self._most_tokens):
            return None
        context = padded_context(seq_len, self._longest)
        if max_query_len == 1:
            padded = padded_rows(num_tokens)
            return PaddedSize(padded, padded, 1, context)
        padded = padded_tokens(num_tokens)
        # Padding tokens belong to padding rows, which are as long as any row may be.
        if has_chunks:
            per_row = min(padded, self._longest)
            most_rows = _power_of_two(num_rows) + max(1, -(-(padded - num_tokens) // per_row))
        else:
            per_row = min(_power_of_two(max_query_len), self._max_query_len)
            most_rows = _power_of_two(num_rows + -(-(padded - num_tokens) // per_row))
        return PaddedSize(padded, min(most_rows, padded), per_row, context)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step that is padded, if it has parts of prompts."""
        return max(self._most_tokens, _MOST_CHUNK_TOKENS)

    def num_bytes(self, block_size: int, num_groups: int) -> int:
        """Return the bytes that the inputs of the largest step take."""
        of_group = 4 * -(-self._longest // block_size) + 8
        return self.most_tokens * (_TOKEN_BYTES + num_groups * of_group) + _SPARE_BYTES


def padded_rows(count: int) -> int:
    """Round a number of decoding rows up: 1, 2, 4, multiples of 8 up to 64, of 16 up to 256, then of 32."""
    if count <= 4:
        return _power_of_two(count)
    step = 8 if count <= 64 else 16 if count <= 256 else 32
    return -(-count // step) * step


def padded_tokens(count: int) -> int:
    """Round a number of tokens up where rows have several: 1, 2, 4, multiples of 8 up to 64, then 4 sizes per doubling.

    Fewer sizes than for decoding rows, because each comes with several numbers of rows.
    """
    if count <= 64:
        return padded_rows(count)
    step = _power_of_two(count) // 8
    return -(-count // step) * step


def padded_context(seq_len: int, longest: int) -> int:
    """Return the context of the graph for a batch whose longest row has `seq_len` tokens: a power of two, or all."""
    return min(max(_SHORTEST_CONTEXT, _power_of_two(seq_len)), longest)


def _power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """The rows of a batch, or of its output rows, on the host: see AttentionMetadata.

    tables: a block table per KV group.   block_size: tokens per block.
    max_query_len, max_seq_len: its largest of both.
    shared: the shared prefix of each group, 0 tokens if it has none; empty if no group has one.
    last_seen: None: every token sees those up to its own.
    """

    query_start: np.ndarray
    seq_lens: np.ndarray
    tables: list[np.ndarray]
    max_query_len: int
    max_seq_len: int
    shared: tuple[np.ndarray, ...] = ()
    last_seen: np.ndarray | None = None
    block_size: int = 0

    @property
    def arrays(self) -> list[np.ndarray]:
        seen = [] if self.last_seen is None else [self.last_seen]
        return [self.query_start, self.seq_lens, *self.tables, *self.shared, *seen]

    def with_shared_prefixes(self, context: np.ndarray, block_size: int) -> "BatchRows":
        """Return the same with the prefixes that rows share.   context: tokens in the cache before this step."""
        found = [find_shared_prefix(table, context, block_size) for table in self.tables]
        if not any(found):
            return self
        return replace(self, shared=tuple(np.array(prefix or (0, 0), np.int32) for prefix in found))

    def with_last_seen(self, positions: np.ndarray, index: np.ndarray, last_seen: np.ndarray) -> "BatchRows":
        """Return the same where some tokens see later ones.

        positions: int32, of the batch's tokens.   index, last_seen: int [n], which tokens see up to which position.
        """
        seen = positions.copy()
        seen[index] = np.maximum(seen[index], last_seen)
        return replace(self, last_seen=seen)

    def padded(self, size: PaddedSize) -> "BatchRows":
        """Return the same with more rows, and tables for more tokens.

        Padding tokens belong to padding rows at the end, which write to the null block; some of these have no tokens.
        """
        count = len(self.seq_lens)
        num_tokens, per_row = int(self.query_start[-1]), size.max_query_len
        further = size.num_tokens - num_tokens - per_row * np.arange(size.num_rows - count, dtype=np.int32)
        further = np.clip(further, 0, per_row)
        query_start = np.concatenate([self.query_start, num_tokens + np.cumsum(further, dtype=np.int32)])
        width = -(-size.context // self.block_size)
        tables = [np.zeros((size.num_rows, width), np.int32) for _ in self.tables]
        for table, of_rows in zip(tables, self.tables, strict=True):
            table[:count, : of_rows.shape[1]] = of_rows
        seq_lens = np.concatenate([self.seq_lens, further])
        return BatchRows(query_start, seq_lens, tables, per_row, size.context, self.shared, block_size=self.block_size)

    def ends(self, wanted: np.ndarray) -> tuple["BatchRows", np.ndarray]:
        """Return the shortest row ends that contain the tokens `wanted`, and their indices in the batch (int64).

        They have at least one token, so that the forward pass needs no special case for none.
        """
        start = self.query_start
        counts = np.zeros(len(start) - 1, np.int32)
        if wanted.size:
            row = np.searchsorted(start, wanted, side="right") - 1
            np.maximum.at(counts, row, (start[row + 1] - wanted).astype(np.int32))
        else:
            counts[-1] = 1
        rows = np.flatnonzero(counts)
        counts, seq_lens = counts[rows], self.seq_lens[rows]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        shift = start[rows + 1] - query_start[1:]  # index in the batch minus index among the ends
        index = np.arange(query_start[-1], dtype=np.int64) + np.repeat(shift, counts)
        tables = [table[rows] for table in self.tables]
        seen = None if self.last_seen is None else self.last_seen[index]
        longest = int(counts.max()), int(seq_lens.max())
        ends = BatchRows(query_start, seq_lens, tables, *longest, last_seen=seen, block_size=self.block_size)
        return ends, index

    def metadata(self, slots: list[torch.Tensor], tensors: list[torch.Tensor]) -> tuple[AttentionMetadata, ...]:
        """slots: of the whole batch, per KV group.   tensors: `arrays`, on the device."""
        query_start, seq_lens, *tables = tensors
        seen = None if self.last_seen is None else tables.pop()
        shared = tables[len(slots) :] if self.shared else [None] * len(slots)
        max_query_len, max_seq_len = self.max_query_len, self.max_seq_len
        return tuple(
            AttentionMetadata(
                query_start, seq_lens, table, of_group, self.block_size, max_query_len, max_seq_len, prefix, seen
            )
            for of_group, table, prefix in zip(slots, tables[: len(slots)], shared, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """Encoder outputs that enter the cache in a step.   values: [n, size].   rows, positions: int [n], where each goes.

    positions: among the encoder tokens of its table row.
    """

    values: torch.Tensor
    rows: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class CrossRows:
    """What a batch, or its output rows, read of the encoder's tokens. Every token is a row of its own, which reads them
    all: no mask is needed, and its bits do not depend on the chunk.

    lengths: int32 [num_tokens], encoder tokens of each token's request.   tables: a block table per group.
    slots: per group, where the encoder tokens of this step are written.
    """

    lengths: np.ndarray
    tables: list[np.ndarray]
    slots: list[np.ndarray]
    block_size: int

    @classmethod
    def of(cls, table: TableMirror, token_rows: np.ndarray, states: StepStates | None, block_size: int) -> "CrossRows":
        """token_rows: of each token of the batch."""
        # A row of a dry run has no encoder tokens; it reads one of the null block.
        lengths = np.maximum(table.num_encoder[token_rows], 1)
        num_blocks = -(-int(lengths.max()) // block_size)
        tables = [table.block_tables[group][token_rows, :num_blocks] for group in table.cross_groups]
        slots = [np.zeros(1, np.int64) for _ in table.cross_groups]
        if states is not None:
            block, offset = np.divmod(states.positions, block_size)
            of_groups = (table.block_tables[group][states.rows, block] for group in table.cross_groups)
            slots = [blocks.astype(np.int64) * block_size + offset for blocks in of_groups]
        return cls(lengths, tables, slots, block_size)

    def select(self, index: np.ndarray) -> "CrossRows":
        """Return those of some of the tokens."""
        return replace(self, lengths=self.lengths[index], tables=[table[index] for table in self.tables])

    @property
    def arrays(self) -> list[np.ndarray]:
        starts = np.arange(len(self.lengths) + 1, dtype=np.int32)
        return [starts, self.lengths, *self.tables, *self.slots]

    def among(
        self, others: tuple[AttentionMetadata, ...], groups: Sequence[int], tensors: list[torch.Tensor]
    ) -> tuple[AttentionMetadata, ...]:
        """Return the metadata of all groups.   others: of those without cross attention.   tensors: `arrays`."""
        starts, lengths, *rest = tensors
        merged, max_seq_len = list(others), int(self.lengths.max())
        for group, table, slots in zip(groups, rest, rest[len(groups) :], strict=False):
            merged.insert(group, AttentionMetadata(starts, lengths, table, slots, self.block_size, 1, max_seq_len))
        return tuple(merged)


@dataclass(frozen=True, slots=True, eq=False)
class DraftedStates:
    """What recurrent layers see of a step that verifies drafts: a row's drafts are a row of their own after it.

    It goes on from the state after the known tokens, which stays, and leaves its own in the block after that one's.

    query_start, seq_lens: as in BatchRows.   tables: a block table per group of states.
    """

    query_start: np.ndarray
    seq_lens: np.ndarray
    tables: list[np.ndarray]
    block_size: int

    @classmethod
    def of(cls, table: TableMirror, output: SchedulerOutput, rows: BatchRows) -> "DraftedStates":
        """Return those of a step.   rows: its batch, in which the drafts of a row follow its known tokens."""
        drafted = num_drafts(output)
        at = drafted.nonzero()[0]
        known = rows.seq_lens - drafted
        num_new = np.insert(np.diff(rows.query_start) - drafted, at + 1, drafted[at])
        # Only where blocks end matters to an op, so the drafts may as well begin with the second block of a row.
        seq_lens = np.insert(known, at + 1, table.block_size + drafted[at])
        pair = (known[at, None] - 1) // table.block_size + np.arange(2)
        tables: list[np.ndarray] = []
        for group in table.state_groups:
            of_rows = rows.tables[group]
            wide = np.zeros((len(of_rows), max(of_rows.shape[1], 2)), np.int32)
            wide[:, : of_rows.shape[1]] = of_rows
            of_drafts = np.zeros((len(at), wide.shape[1]), np.int32)
            of_drafts[:, :2] = table.block_tables[group][output.rows[at, None], pair]
            tables.append(np.insert(wide, at + 1, of_drafts, axis=0))
        query_start = np.concatenate(([0], np.cumsum(num_new))).astype(np.int32)
        return cls(query_start, seq_lens.astype(np.int32), tables, table.block_size)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.query_start, self.seq_lens, *self.tables]

    def among(
        self, others: tuple[AttentionMetadata, ...], groups: Sequence[int], tensors: list[torch.Tensor]
    ) -> tuple[AttentionMetadata, ...]:
        """Return the metadata of all groups.   others: as if there were no drafts.   tensors: `arrays`."""
        starts, lengths, *tables = tensors
        changed, longest = list(others), int(self.seq_lens.max())
        for group, table in zip(groups, tables, strict=True):
            changed[group] = replace(
                changed[group], query_start=starts, seq_lens=lengths, block_table=table, max_seq_len=longest
            )
        return tuple(changed)


def num_drafts(output: SchedulerOutput) -> np.ndarray:
    """Return how many drafts each row of the step has, int32 [num_rows]."""
    found = np.zeros(len(output.rows), np.int32)
    for i in np.flatnonzero(np.isin(output.rows, np.fromiter(output.drafts, np.int32, len(output.drafts)))):
        found[i] = len(output.drafts[int(output.rows[i])])
    return found


def gather_rows(
    table: TableMirror, output: SchedulerOutput
) -> tuple[BatchRows, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the rows of a step, and what is known of its tokens, one row after the other.

    Of each token: the table row, its position (int32), and per KV group the slot of its keys and values (int64); groups
    of cross attention have CrossRows.
    """
    block_size, num_rows = table.block_size, len(output.rows)
    # Kernels read raw int32 memory.
    start, num_new = output.start.astype(np.int32, copy=False), output.num_new.astype(np.int32, copy=False)
    query_start = np.zeros(num_rows + 1, np.int32)
    np.cumsum(num_new, out=query_start[1:])
    seq_lens = start + num_new
    max_query_len, max_seq_len = int(num_new.max()), int(seq_lens.max())
    if max_query_len == 1:
        token_rows, at_row = output.rows, np.arange(num_rows)
        positions = np.array(start)  # a copy: the scheduler's own array may be a strided view
    else:
        token_rows, at_row = np.repeat(output.rows, num_new), np.repeat(np.arange(num_rows), num_new)
        positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(start - query_start[:-1], num_new)
    tables: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    block, offset = np.divmod(positions, block_size)
    for of_group in table.growing_tables:
        of_rows = of_group[output.rows, : -(-max_seq_len // block_size)]
        tables.append(of_rows)
        slots.append(of_rows[at_row, block].astype(np.int64) * block_size + offset)
    if not tables:  # a model without KV still needs to know where rows begin
        tables, slots = [np.zeros((num_rows, 1), np.int32)], [np.zeros(1, np.int64)]
    rows = BatchRows(query_start, seq_lens, tables, max_query_len, max_seq_len, block_size=block_size)
    return rows, token_rows, positions, slots
