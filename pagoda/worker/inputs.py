"""Build the tensors of one forward pass from a SchedulerOutput, with numpy operations and no Python loop over rows."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.base.pooling import PoolingKind
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import ForwardBatch, Input, Tail
from pagoda.kernels.sampling.draw_params import DrawParams
from pagoda.kernels.transfer import to_device
from pagoda.layers.adapted_ops import ADAPTERS, TAIL_ADAPTERS
from pagoda.layers.embedding import EMBED_ROWS, EMBEDS
from pagoda.models.base import TOKEN_TYPES
from pagoda.ops.declare import Domain
from pagoda.worker.decode_inputs import DecodeInputs
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.draws import draw_params, step_draws
from pagoda.worker.pooler import PooledChunk
from pagoda.worker.prompt_embeds import StepEmbeds
from pagoda.worker.queries import Queries
from pagoda.worker.tokens_in_flight import TokensInFlight

_NONE = np.empty(0, np.int64)
_DOMAINS = {TAIL_ADAPTERS: Domain.TAIL, EMBED_ROWS: Domain.EMBEDS}


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step, ready to run. A *draw* is one token to sample: one per sample row, plus one per draft of the row.

    batch: the model's input; its logits_index has the draws' positions, then those of `prompt_rows`, then those of
        `pooled`, all as indices into the batch's tail. A batch in DecodeInputs has further rows at its end.
    draw_rows, draw_positions: int32 [num_draws], table row and position in its sequence of each token to sample.
    draw_logits: int64 [num_draws], the logits of each draw, or None if draw i reads logits i (no fork shares any).
    draw_index: `draw_rows` on the device, int64.   draw_params: None if all draws are greedy.
    num_logits: number of distinct logits of all draws.   num_draws: int32 [num_samples].
    takes_all_logits: logits_index is every token of the tail in order (except for rows that fill the batch up).
    prompt_rows: (row, first prompt position, count) of positions with requested prompt logprobs.
    pooled: chunks of the prompts to pool.
    logits_adapters: int32, the adapter's slot for each of logits_index; None if no row of the step has an adapter.
    """

    batch: ForwardBatch
    draw_rows: np.ndarray
    draw_positions: np.ndarray
    draw_logits: torch.Tensor | None
    draw_index: torch.Tensor
    draw_params: DrawParams | None
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
    in_flight: TokensInFlight | None = None,
    decode_inputs: DecodeInputs | None = None,
) -> StepInputs:
    """Gather the step's inputs. `output` must not be empty and must have been applied to `table`.

    Everything is moved to the device in one copy, for which the host does not wait.
    adapters: int32 [max_rows], the slot of each row's adapter; None if no row of the step has one.
    pooling: which hidden states pooled rows need.
    num_token_types: of a model that takes token types, else 0.
    embeds: prompt embeddings among the step's tokens.   in_flight: tokens that `table` does not have yet.
    decode_inputs: where a step that only decodes, and of which nothing else is special, is put, padded.
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
    draws = step_draws(output, query_start, seq_lens)
    extra, prompt_rows, pooled = _extra_logits(table, output, query_start, pooling)
    logits_index = np.concatenate([draws.logits_index, extra]) if extra.size else draws.logits_index

    everything = tail = Queries(query_start, seq_lens, tables)
    if device.type == "cuda" and max_query_len == 1:
        everything = tail = everything.with_shared_prefixes(start, block_size)
    index = None
    if not _counts_up(logits_index, len(positions)):  # otherwise, as in plain decoding, the tail is the batch
        tail, index = everything.tail(logits_index)
        logits_index = np.searchsorted(index, logits_index)
    num_logits_index = len(logits_index)
    of_tokens = [table.token_ids[row_of_token, positions], positions]
    size = None
    is_plain = max_query_len == 1 and adapters is None and embeds is None and not num_token_types
    if decode_inputs is not None and is_plain and index is None:
        size = decode_inputs.size_of(num_rows, int(seq_lens.max()))
    if size is not None:
        # The arrays of the batch come first: in all steps of a size, they are at the same addresses.
        everything = tail = everything.padded(*size, block_size)
        of_tokens, slots = ([_with_zeros(array, size[0]) for array in arrays] for arrays in (of_tokens, slots))
        logits_index = np.arange(size[0])
    bulk = _Bulk()
    of_batch, of_slots, of_queries = bulk.add(*of_tokens), bulk.add(*slots), bulk.add(*everything.arrays)
    of_tail = of_queries if index is None else bulk.add(*tail.arrays)
    of_index = bulk.add(logits_index) if index is None else bulk.add(logits_index, index)
    params = draw_params(table, draws.rows, draws.positions)
    of_params = bulk.add(*(params.columns if params is not None else ()))
    of_draws = bulk.add(draws.rows.astype(np.int64), *([] if draws.logits is None else [draws.logits]))
    unknown = in_flight.unknown(row_of_token, positions) if in_flight is not None else _NONE
    of_unknown = bulk.add(unknown, row_of_token[unknown].astype(np.int64))
    named = _input_arrays(table, row_of_token, positions, index, adapters, num_token_types, embeds)
    of_named = bulk.add(*named.values())
    of_logits_adapters = None
    if adapters is not None:
        of_logits_adapters = bulk.add(named[ADAPTERS if index is None else TAIL_ADAPTERS][logits_index])
    if decode_inputs is None or size is None:
        bulk.move(device)
    else:
        bulk.move_into(decode_inputs, block_size, len(slots))

    token_ids, positions_t = bulk[of_batch]
    if in_flight is not None and unknown.size:
        at, their_rows = bulk[of_unknown]
        token_ids.index_copy_(0, at, in_flight.tokens.index_select(0, their_rows))
    metadata = everything.metadata(bulk[of_slots], bulk[of_queries], block_size)
    tail_metadata = metadata if index is None else tail.metadata(bulk[of_slots], bulk[of_tail], block_size)
    # If the tail is the batch, its index counts up, as the index of its logits does.
    logits_index_t, tail_index = bulk[of_index][0], bulk[of_index][-1]
    inputs = {
        name: Input(tensor, _DOMAINS.get(name, Domain.TOKENS))
        for name, tensor in zip(named, bulk[of_named], strict=True)
    }
    if embeds is not None:
        inputs[EMBEDS] = Input(embeds.values, Domain.EMBEDS)
    draw_index, *draw_logits = bulk[of_draws]
    return StepInputs(
        batch=ForwardBatch(
            token_ids,
            positions_t,
            metadata,
            Tail(tail_index, tail_metadata),
            logits_index_t[:num_logits_index],
            inputs=inputs,
        ),
        draw_rows=draws.rows,
        draw_positions=draws.positions,
        draw_logits=draw_logits[0] if draw_logits else None,
        draw_index=draw_index,
        draw_params=None if params is None else replace(params, on_device=tuple(bulk[of_params])),
        num_logits=len(draws.logits_index),
        num_draws=draws.num,
        takes_all_logits=index is None or _counts_up(logits_index, len(index)),
        prompt_rows=prompt_rows,
        pooled=pooled,
        logits_adapters=None if of_logits_adapters is None else bulk[of_logits_adapters][0],
    )


class _Bulk:
    """Arrays that are moved to the device together.   bulk[bulk.add(...)]: some of them, once they are there."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._moved: list[torch.Tensor] = []

    def add(self, *arrays: np.ndarray) -> slice:
        begin = len(self._arrays)
        self._arrays += arrays
        return slice(begin, len(self._arrays))

    def move(self, device: torch.device) -> None:
        self._moved = to_device(self._arrays, device)

    def move_into(self, decode_inputs: DecodeInputs, block_size: int, num_groups: int) -> None:
        self._moved = decode_inputs.move(self._arrays, block_size, num_groups)

    def __getitem__(self, part: slice) -> list[torch.Tensor]:
        return self._moved[part]


def _input_arrays(
    table: DeviceTable,
    row_of_token: np.ndarray,
    positions: np.ndarray,
    tail: np.ndarray | None,
    adapters: np.ndarray | None,
    num_token_types: int,
    embeds: StepEmbeds | None,
) -> dict[str, np.ndarray]:
    """Return the named inputs of the forward that are made on the host.   tail: its tokens; None: it is the batch."""
    named: dict[str, np.ndarray] = {}
    if adapters is not None:
        named[ADAPTERS] = adapters[row_of_token]
        named[TAIL_ADAPTERS] = named[ADAPTERS] if tail is None else named[ADAPTERS][tail]
    if num_token_types:
        of_pair = positions >= table.pair_start[row_of_token] if num_token_types > 1 else np.zeros(len(positions))
        named[TOKEN_TYPES] = of_pair.astype(np.int32)
    if embeds is not None:
        named[EMBED_ROWS] = embeds.index
    return named


def _with_zeros(array: np.ndarray, length: int) -> np.ndarray:
    """Return `array` with zeros after it."""
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer


def _counts_up(index: np.ndarray, to: int) -> bool:
    """Return whether `index` is 0 .. to - 1."""
    return len(index) == to and bool((index == np.arange(to)).all())


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
