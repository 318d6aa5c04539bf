"""Build the tensors of one forward pass from a SchedulerOutput, with numpy operations and no Python loop over rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.base.pooling import PoolingKind
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import ForwardBatch, Input, KVLayer, Tail
from pagoda.kernels.sampling.draw_params import DrawParams
from pagoda.kernels.transfer import BulkArrays
from pagoda.layers.adapted_ops import ADAPTERS, TAIL_ADAPTERS
from pagoda.layers.embedding import EMBED_ROWS, EMBEDS
from pagoda.models.base import TOKEN_TYPES
from pagoda.ops.declare import Domain
from pagoda.worker.decode_inputs import DecodeInputs
from pagoda.worker.draws import draw_params, step_draws
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.pooler import PooledChunk
from pagoda.worker.prompt_embeds import StepEmbeds
from pagoda.worker.queries import Queries
from pagoda.worker.step_tokens import StepTokens, with_zeros
from pagoda.worker.table_mirror import TableMirror
from pagoda.worker.tokens_in_flight import TokensInFlight

_NONE = np.empty(0, np.int64)
_DOMAINS = {TAIL_ADAPTERS: Domain.TAIL, EMBED_ROWS: Domain.EMBEDS}


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step, ready to run. A *draw* is one token to sample: one per sample row, plus one per draft of the row.

    batch: the model's input; its logits_index has the draws' positions, then those of `prompt_rows`, then those of
        `pooled`, all as indices into the batch's tail. A batch in DecodeInputs ends with padding tokens.
    draw_rows, draw_positions: int32 [num_draws], table row and position in its sequence of each token to sample.
    draw_logits: int64 [num_draws], the logits of each draw, or None if draw i reads logits i (no fork shares any).
    draw_index: `draw_rows` on the device, int64.   draw_params: None if all draws are greedy.
    num_logits: number of distinct logits of all draws.   num_draws: int32 [num_samples].
    takes_all_logits: logits_index is every token of the tail in order, padding tokens aside.
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

    def run(self, forward: ForwardPass, kv: Sequence[KVLayer], num_layers: int = 0) -> torch.Tensor:
        """Run the forward pass; return the final hidden states of `logits_index`, [num_logits_index, hidden].

        num_layers: run only so many of the first layers; 0: all.
        """
        batch = replace(self.batch, num_layers=num_layers) if num_layers else self.batch
        hidden = forward.forward(batch, kv)
        if self.takes_all_logits:
            return hidden[: batch.logits_index.shape[0]]
        return forward.select_rows(hidden, batch.logits_index)


def build_inputs(
    table: TableMirror,
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
    decode_inputs: where a step of few tokens per row is put, padded, if it has no prompt embeddings and no forks.
    """
    tokens = StepTokens.gather(table, output)
    draws = step_draws(output, tokens.queries.query_start, tokens.queries.seq_lens)
    extra, prompt_rows, pooled = _extra_logits(table, output, tokens.queries.query_start, pooling)
    unknown = in_flight.unknown(tokens.rows, tokens.positions) if in_flight is not None else _NONE
    if decode_inputs is not None and tokens.is_decode:  # only kernels whose steps are captured read it
        tokens = tokens.with_shared_prefixes(output.start)
    logits_index = np.concatenate([draws.logits_index, extra]) if extra.size else draws.logits_index
    size = None
    if decode_inputs is not None and embeds is None and not num_token_types and draws.logits is None:
        seq_len = int(tokens.queries.seq_lens.max())
        size = decode_inputs.size_of(len(output.rows), len(tokens.rows), tokens.max_query_len, seq_len)
    tail = _Tail.of(tokens, logits_index) if size is None else _Tail.whole(tokens, logits_index)
    named = _input_arrays(table, tokens, tail, adapters, num_token_types, embeds)
    if size is not None:
        tokens = tokens.padded(size)
        tail = replace(tail, queries=tokens.queries)
        named = {name: with_zeros(array, size.num_tokens) for name, array in named.items()}

    # What the forward reads comes first: in all padded steps of a size, it is at the same addresses.
    bulk = BulkArrays()
    of_batch, of_slots = bulk.add(tokens.token_ids, tokens.positions), bulk.add(*tokens.slots)
    of_queries = bulk.add(*tokens.queries.arrays)
    of_tail = of_queries if tail.index is None else bulk.add(*tail.queries.arrays)
    of_tail_index = bulk.add(np.arange(len(tokens.positions)) if tail.index is None else tail.index)
    of_named = bulk.add(*named.values())
    of_logits_index = bulk.add(tail.logits_index)
    params = draw_params(table, draws.rows, draws.positions)
    of_params = bulk.add(*(params.columns if params is not None else ()))
    of_draws = bulk.add(draws.rows.astype(np.int64), *([] if draws.logits is None else [draws.logits]))
    of_unknown = bulk.add(unknown, tokens.rows[unknown].astype(np.int64))
    of_logits_adapters = bulk.add(*([named[TAIL_ADAPTERS][tail.logits_index]] if adapters is not None else []))
    if decode_inputs is None or size is None:
        bulk.move(device)
    else:
        bulk.moved_as(decode_inputs.move(bulk.arrays, table.block_size, len(tokens.slots)))

    token_ids, positions = bulk[of_batch]
    if in_flight is not None and unknown.size:
        at, their_rows = bulk[of_unknown]
        token_ids.index_copy_(0, at, in_flight.tokens.index_select(0, their_rows))
    metadata = tokens.queries.metadata(bulk[of_slots], bulk[of_queries], table.block_size)
    tail_metadata = metadata
    if tail.index is not None:
        tail_metadata = tail.queries.metadata(bulk[of_slots], bulk[of_tail], table.block_size)
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
            positions,
            metadata,
            Tail(bulk[of_tail_index][0], tail_metadata),
            bulk[of_logits_index][0],
            inputs=inputs,
        ),
        draw_rows=draws.rows,
        draw_positions=draws.positions,
        draw_logits=draw_logits[0] if draw_logits else None,
        draw_index=draw_index,
        draw_params=None if params is None else replace(params, on_device=tuple(bulk[of_params])),
        num_logits=len(draws.logits_index),
        num_draws=draws.num,
        takes_all_logits=tail.takes_all_logits,
        prompt_rows=prompt_rows,
        pooled=pooled,
        logits_adapters=bulk[of_logits_adapters][0] if adapters is not None else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tail:
    """The tail of a batch on the host: see ops.batch.Tail.

    index: which of the batch's tokens; None: all of them, as in plain decoding.
    logits_index: which tokens of the tail give logits.   takes_all_logits: every one does, in order.
    """

    queries: Queries
    index: np.ndarray | None
    logits_index: np.ndarray
    takes_all_logits: bool

    @classmethod
    def whole(cls, tokens: StepTokens, logits_index: np.ndarray) -> "_Tail":
        """Return the tail that is the batch."""
        return cls(tokens.queries, None, logits_index, _counts_up(logits_index, len(tokens.positions)))

    @classmethod
    def of(cls, tokens: StepTokens, logits_index: np.ndarray) -> "_Tail":
        """Return the shortest tail with the tokens `logits_index` of the batch."""
        if _counts_up(logits_index, len(tokens.positions)):
            return cls(tokens.queries, None, logits_index, True)
        queries, index = tokens.queries.tail(logits_index)
        in_tail = np.searchsorted(index, logits_index)
        return cls(queries, index, in_tail, _counts_up(in_tail, len(index)))


def _input_arrays(
    table: TableMirror,
    tokens: StepTokens,
    tail: _Tail,
    adapters: np.ndarray | None,
    num_token_types: int,
    embeds: StepEmbeds | None,
) -> dict[str, np.ndarray]:
    """Return the named inputs of the forward that are made on the host."""
    named: dict[str, np.ndarray] = {}
    if adapters is not None:
        named[ADAPTERS] = adapters[tokens.rows]
        named[TAIL_ADAPTERS] = named[ADAPTERS] if tail.index is None else named[ADAPTERS][tail.index]
    if num_token_types:
        is_second = np.zeros(len(tokens.positions), np.int32)
        if num_token_types > 1:
            is_second[:] = tokens.positions >= table.pair_start[tokens.rows]
        named[TOKEN_TYPES] = is_second
    if embeds is not None:
        named[EMBED_ROWS] = embeds.index
    return named


def _counts_up(index: np.ndarray, to: int) -> bool:
    """Return whether `index` is 0 .. to - 1."""
    return len(index) == to and bool((index == np.arange(to)).all())


def _extra_logits(
    table: TableMirror, output: SchedulerOutput, query_start: np.ndarray, pooling: PoolingKind
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
