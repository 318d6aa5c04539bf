"""Build the tensors of one forward pass from a SchedulerOutput, with numpy operations and no Python loop over rows."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.base.pooling import PoolingKind
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, Input, Tail
from pagoda.kernels.transfer import to_device
from pagoda.layers.adapted_ops import ADAPTERS, TAIL_ADAPTERS
from pagoda.layers.embedding import EMBED_ROWS, EMBEDS
from pagoda.models.base import TOKEN_TYPES
from pagoda.ops.declare import Domain
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.pooler import PooledChunk
from pagoda.worker.prompt_embeds import StepEmbeds


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step, ready to run. A *draw* is one token to sample: one per sample row, plus one per draft of the row.

    batch: the model's input; its logits_index has the draws' positions, then those of `prompt_rows`, then those of
        `pooled`, all as indices into the batch's tail.
    draw_rows, draw_positions: int32 [num_draws], table row and position in its sequence of each token to sample.
    draw_logits: int64 [num_draws], the logits of each draw, or None if draw i reads logits i (no fork shares any).
    num_logits: number of distinct logits of all draws.   num_draws: int32 [num_samples].
    takes_all_logits: logits_index is every token of the tail in order.
    prompt_rows: (row, first prompt position, count) of positions with requested prompt logprobs.
    pooled: chunks of the prompts to pool.
    logits_adapters: int32, the adapter's slot for each of logits_index; None if no row of the step has an adapter.
    """

    batch: ForwardBatch
    draw_rows: np.ndarray
    draw_positions: np.ndarray
    draw_logits: np.ndarray | None
    num_logits: int
    num_draws: np.ndarray
    takes_all_logits: bool
    prompt_rows: tuple[tuple[int, int, int], ...]
    pooled: tuple[PooledChunk, ...]
    logits_adapters: torch.Tensor | None = None


def build_inputs(
    table: DeviceTable,
    output: SchedulerOutput,
    device: torch.device,
    adapters: np.ndarray | None = None,
    pooling: PoolingKind = PoolingKind.LAST,
    num_token_types: int = 0,
    embeds: StepEmbeds | None = None,
) -> StepInputs:
    """Gather the step's inputs. `output` must not be empty and must have been applied to `table`.

    adapters: int32 [max_rows], the slot of each row's adapter; None if no row of the step has one.
    pooling: which hidden states pooled rows need.
    num_token_types: of a model that takes token types, else 0.
    embeds: prompt embeddings among the step's tokens.
    """
    rows = output.rows
    # Kernels read raw int32 memory.
    start, num_new = output.start.astype(np.int32, copy=False), output.num_new.astype(np.int32, copy=False)
    num_rows = len(rows)
    query_start = np.zeros(num_rows + 1, np.int32)
    np.cumsum(num_new, out=query_start[1:])
    seq_lens = start + num_new
    max_query_len = int(num_new.max())
    if max_query_len == 1:
        row_of_token, slot_of_row = rows, np.arange(num_rows)
        positions = np.array(start)  # a copy: the scheduler's own array may be a strided view
    else:
        row_of_token = np.repeat(rows, num_new)
        slot_of_row = np.repeat(np.arange(num_rows), num_new)
        positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(start - query_start[:-1], num_new)
    block_size = table.block_size
    num_blocks = -(-int(seq_lens.max()) // block_size)
    logical, offset = np.divmod(positions, block_size)
    tables = [block_table[rows, :num_blocks] for block_table in table.block_tables]
    slots = [of_rows[slot_of_row, logical].astype(np.int64) * block_size + offset for of_rows in tables]
    if not tables:  # a model without KV still needs to know where rows begin
        tables, slots = [np.zeros((num_rows, 1), np.int32)], [np.zeros(1, np.int64)]
    draws = _draws(output, query_start, seq_lens)
    extra, prompt_rows, pooled = _extra_logits(table, output, query_start, pooling)
    logits_index = np.concatenate([draws.logits_index, extra]) if extra.size else draws.logits_index

    everything = _Queries(query_start, seq_lens, tables)
    arrays = [table.token_ids[row_of_token, positions], positions, *slots, *everything.arrays]
    all_in_order = _counts_up(logits_index, len(positions))
    if all_in_order:  # plain decoding: the tail is the batch
        token_ids, positions_t, *rest, tail_index = to_device([*arrays, logits_index], device)
        metadata = tail_metadata = everything.metadata(rest, block_size)
        logits_index_t, index = tail_index, None
    else:
        tail, index = everything.tail(logits_index)
        logits_index = np.searchsorted(index, logits_index)
        all_in_order = _counts_up(logits_index, len(index))
        tensors = to_device([*arrays, *tail.arrays, index, logits_index], device)
        token_ids, positions_t, *rest, tail_index, logits_index_t = tensors
        metadata = everything.metadata(rest, block_size)
        tail_metadata = tail.metadata(rest[: len(slots)] + rest[-len(tail.arrays) :], block_size)
    batch = ForwardBatch(token_ids, positions_t, metadata, Tail(tail_index, tail_metadata), logits_index_t)
    logits_adapters = None
    if adapters is not None:
        of_tokens = adapters[row_of_token]
        of_tail = of_tokens if index is None else of_tokens[index]
        tokens, of_tail_t, logits_adapters = to_device([of_tokens, of_tail, of_tail[logits_index]], device)
        batch = replace(batch, inputs={ADAPTERS: Input(tokens), TAIL_ADAPTERS: Input(of_tail_t, Domain.TAIL)})
    if num_token_types:
        of_pair = positions >= table.pair_start[row_of_token] if num_token_types > 1 else np.zeros(len(positions))
        (types,) = to_device([of_pair.astype(np.int32)], device)
        batch = replace(batch, inputs={**batch.inputs, TOKEN_TYPES: Input(types)})
    if embeds is not None:
        (index_t,) = to_device([embeds.index], device)
        of_embeds = {EMBEDS: Input(embeds.values, Domain.EMBEDS), EMBED_ROWS: Input(index_t, Domain.EMBEDS)}
        batch = replace(batch, inputs={**batch.inputs, **of_embeds})
    return StepInputs(
        batch=batch,
        draw_rows=draws.rows,
        draw_positions=draws.positions,
        draw_logits=draws.logits,
        num_logits=len(draws.logits_index),
        num_draws=draws.num,
        takes_all_logits=all_in_order,
        prompt_rows=prompt_rows,
        pooled=pooled,
        logits_adapters=logits_adapters,
    )


def _counts_up(index: np.ndarray, to: int) -> bool:
    """Return whether `index` is 0 .. to - 1."""
    return len(index) == to and bool((index == np.arange(to)).all())


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """The queries of attention, on the host: see AttentionMetadata.   tables: a block table per KV group."""

    query_start: np.ndarray
    seq_lens: np.ndarray
    tables: list[np.ndarray]

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.query_start, self.seq_lens, *self.tables]

    def metadata(self, tensors: list[torch.Tensor], block_size: int) -> tuple[AttentionMetadata, ...]:
        """tensors: the batch's slots per KV group, then `arrays`, on the device."""
        count = len(self.tables)
        longest, furthest = int(np.diff(self.query_start).max()), int(self.seq_lens.max())
        query_start, seq_lens = tensors[count : count + 2]
        return tuple(
            AttentionMetadata(query_start, seq_lens, table, slots, block_size, longest, furthest)
            for slots, table in zip(tensors[:count], tensors[count + 2 :], strict=False)
        )

    def tail(self, logits_index: np.ndarray) -> tuple["_Queries", np.ndarray]:
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
        return _Queries(tail_start, self.seq_lens[rows], [table[rows] for table in self.tables]), index


@dataclass(frozen=True, slots=True, eq=False)
class _Draws:
    rows: np.ndarray
    positions: np.ndarray
    logits: np.ndarray | None
    logits_index: np.ndarray
    num: np.ndarray


def _draws(output: SchedulerOutput, query_start: np.ndarray, seq_lens: np.ndarray) -> _Draws:
    """Return which tokens to sample, and from which token positions of the batch."""
    index = output.sample_index
    num = np.ones(len(index), np.int32)
    last = query_start[index + 1].astype(np.int64) - 1
    positions = seq_lens[index]
    if not output.drafts:
        if not output.forks:
            return _Draws(output.sample_rows, positions, None, last, num)
        shared, logits = np.unique(last, return_inverse=True)
        return _Draws(output.sample_rows, positions, logits, shared, num)
    num_drafts = np.zeros(len(query_start) - 1, np.int32)
    for i in np.flatnonzero(np.isin(output.rows, np.fromiter(output.drafts, np.int32, len(output.drafts)))):
        num_drafts[i] = len(output.drafts[int(output.rows[i])])
    num += num_drafts[index]
    ends = np.cumsum(num)
    # Distance of each draw from the last position of its sample row: num - 1 .. 0.
    back = np.repeat(ends, num) - 1 - np.arange(ends[-1] if ends.size else 0)
    shared, logits = np.unique(np.repeat(last, num) - back, return_inverse=True)
    return _Draws(
        np.repeat(output.sample_rows, num), (np.repeat(positions, num) - back).astype(np.int32), logits, shared, num
    )


def _extra_logits(
    table: DeviceTable, output: SchedulerOutput, query_start: np.ndarray, pooling: PoolingKind
) -> tuple[np.ndarray, tuple[tuple[int, int, int], ...], tuple[PooledChunk, ...]]:
    """Return the positions needed in addition to the draws': of prompt logprobs, then of pooled prompts."""
    rows = output.rows
    prompt_rows: list[tuple[int, int, int]] = []
    pooled: list[PooledChunk] = []
    index: list[np.ndarray] = []
    wanted = np.flatnonzero(table.wants_states[rows]).tolist()
    for i in wanted:
        row, first = int(rows[i]), int(output.start[i])
        count = min(first + int(output.num_new[i]), int(table.num_prompt[row]) - 1) - first
        if table.num_prompt_logprobs[row] >= 0 and count > 0:
            prompt_rows.append((row, first, count))
            index.append(np.arange(query_start[i], query_start[i] + count, dtype=np.int64))
    for i in wanted:
        row, start = int(rows[i]), int(output.start[i])
        params = table.pooling[row]
        if params is None:
            continue
        chunk = PooledChunk.of(pooling, params, row, start, int(output.num_new[i]), int(table.num_prompt[row]))
        if chunk.count or chunk.ends:
            pooled.append(chunk)
            begin = int(query_start[i]) + chunk.first - start
            index.append(np.arange(begin, begin + chunk.count, dtype=np.int64))
    positions = np.concatenate(index) if index else np.empty(0, np.int64)
    return positions, tuple(prompt_rows), tuple(pooled)
