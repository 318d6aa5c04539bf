"""StagingBatch: the inputs of one forward pass after the other, gathered from the rows and moved in one copy.

Gathered with numpy operations over whole columns and no loop over rows that only decode. The inputs of padded steps
are at the same addresses in all steps of a size. What else a step's inputs come from is here, too: how its tokens are
drawn, the tokens that only the device has, and prompts that are given as embeddings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.base.pooling import PER_TOKEN, PoolingKind, PoolingParams
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import ForwardBatch, Input, OutputRows
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.sampling.reference import uniforms
from pagoda.kernels.transfer import parts_to_device
from pagoda.layers.adapted_ops import ADAPTERS, LOGITS_ADAPTERS, OUTPUT_ADAPTERS
from pagoda.layers.attention import ENCODER_STATES
from pagoda.layers.linear import EMBED_ROWS, EMBEDS
from pagoda.models.base import TOKEN_TYPES
from pagoda.ops.declare import Domain
from pagoda.worker.batch_rows import (
    BatchRows,
    CrossRows,
    DraftedStates,
    PaddedSize,
    Padding,
    StepStates,
    gather_rows,
    num_drafts,
)
from pagoda.worker.table_mirror import TableMirror

_NONE = np.empty(0, np.int64)
_DOMAINS = {OUTPUT_ADAPTERS: Domain.OUTPUTS, LOGITS_ADAPTERS: Domain.LOGITS, EMBED_ROWS: Domain.EMBEDS}


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """What a step contributes to the pooling of a row.

    first, count: the tokens of the chunk whose hidden states are needed, as positions in the prompt.
    begins: the prompt's first token is in the chunk.   ends: its last one is.
    """

    row: int
    first: int
    count: int
    begins: bool
    ends: bool

    @classmethod
    def of(
        cls, kind: PoolingKind, params: PoolingParams, row: int, start: int, num_new: int, num_prompt: int
    ) -> "PooledChunk":
        """Return the part of a chunk of `num_new` tokens from `start` on."""
        begins, ends = start == 0, start + num_new == num_prompt
        if params.task in PER_TOKEN or kind is PoolingKind.MEAN:
            return cls(row, start, num_new, begins, ends)
        if kind is PoolingKind.CLS:
            return cls(row, 0, int(begins), begins, ends)
        return cls(row, num_prompt - 1, int(ends), begins, ends)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step, ready to run. A *draw* is one token to sample: one per sample row, plus one per draft of the row.

    batch: the model's input; its logits_index has the draws' tokens, as indices into the batch's output rows.
    size: to which the batch is padded, with logits_index as long as its tokens if all give logits; None: it is not
        padded.
    draw_rows, draw_positions: int32 [num_draws], table row and position in its sequence of each token to sample.
    draw_logits: int64 [num_draws], the logits of each draw, or None if draw i reads logits i (no fork shares any).
    draw_index: `draw_rows` on the device, int64.   draw_params: None if all draws are greedy.
    num_logits: number of distinct logits of all draws.   num_draws: int32 [num_samples].
    prompt_rows: (row, first prompt position, count) of positions with requested prompt logprobs.
    pooled: chunks of the prompts to pool.
    states_index: int64, the hidden states of `prompt_rows`, then those of `pooled`; None: all output rows.
    states_adapters: int32, the slot of the adapter of each of these; None if no row of the step has one.
    """

    batch: ForwardBatch
    size: PaddedSize | None
    draw_rows: np.ndarray
    draw_positions: np.ndarray
    draw_logits: torch.Tensor | None
    draw_index: torch.Tensor
    draw_params: DrawParams | None
    num_logits: int
    num_draws: np.ndarray
    prompt_rows: tuple[tuple[int, int, int], ...]
    pooled: tuple[PooledChunk, ...]
    states_index: torch.Tensor | None
    states_adapters: torch.Tensor | None

    def logits_of_draws(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of each draw.   logits: of the batch, see Computed."""
        logits = logits[: self.num_logits]
        return logits if self.draw_logits is None else logits.index_select(0, self.draw_logits)


class StagingBatch:
    """Makes the inputs of one model's steps, one after the other.

    Host memory is new in each step, on a GPU pinned (see `bulk_copy`), since an earlier copy may not be complete. The
    device's is allocated once for padded steps: the next step's copy is submitted after all that reads this one's.
    """

    def __init__(self, device: torch.device, num_token_types: int = 0, padding: Padding | None = None) -> None:
        """num_token_types: of a model that takes token types, else 0.   padding: None: no step is padded."""
        self.device = device
        self.padding = padding
        self._num_token_types = num_token_types
        self._memory: torch.Tensor | None = None  # of padded steps

    def fill(
        self,
        table: TableMirror,
        output: SchedulerOutput,
        adapters: np.ndarray | None = None,
        pooling: PoolingKind = PoolingKind.LAST,
        embeds: "StepEmbeds | None" = None,
        last_tokens: "LastTokens | None" = None,
        num_layers: int = 0,
        states: StepStates | None = None,
    ) -> StepInputs:
        """Return the step's inputs. `output` must not be empty and must have been applied to `table`.

        Everything is moved to the device in one copy, for which the host does not wait. A step of few tokens is padded
        if it has neither prompt embeddings nor forks, and its model neither token types nor cross attention nor
        positions of several kinds.
        adapters: int32 [max_rows], the slot of each row's adapter; None if no row of the step has one.
        pooling: which hidden states pooled rows need.   embeds: prompt embeddings among the step's tokens.
        last_tokens: may have tokens that `table` does not have yet.   num_layers: see ForwardBatch.
        states: encoder outputs that enter the cache in this step.
        Raises InvariantBroken for more than one token to sample per token of a padded step.
        """
        block_size = table.block_size
        rows, token_rows, positions, slots = gather_rows(table, output)
        num_tokens, token_ids = len(positions), table.token_ids[token_rows, positions]
        draw_rows, draw_positions, draw_logits, logits_index, num_draws = _draws(output, rows)
        prompt_rows, pooled, states_index = _wanted_states(table, output, rows.query_start, pooling)
        num_logits = len(logits_index)
        size = None
        is_plain = embeds is None and not self._num_token_types and not table.cross_groups and table.rotary is None
        if self.padding is not None and is_plain and draw_logits is None:
            size = self.padding.size_of(len(output.rows), num_tokens, rows.max_query_len, rows.max_seq_len)
        if self.padding is not None and rows.max_query_len == 1:  # only kernels whose steps are captured read them
            rows = rows.with_shared_prefixes(output.start, block_size)
        if embeds is not None and embeds.last_seen is not None:
            rows = rows.with_last_seen(positions, embeds.index, embeds.last_seen)
        outputs, output_index = rows, None
        wanted = np.concatenate([logits_index, states_index]) if states_index.size else logits_index
        if size is None and not _counts_up(wanted, num_tokens):
            outputs, output_index = rows.ends(wanted)
            logits_index, states_index = (
                np.searchsorted(output_index, index) for index in (logits_index, states_index)
            )

        named: dict[str, np.ndarray] = {}  # further inputs of the forward that are made on the host
        states_adapters: list[np.ndarray] = []
        if adapters is not None:
            named[ADAPTERS] = of_all = adapters[token_rows]
            named[OUTPUT_ADAPTERS] = of_outputs = of_all if output_index is None else of_all[output_index]
            named[LOGITS_ADAPTERS], states_adapters = of_outputs[logits_index], [of_outputs[states_index]]
        if self._num_token_types:
            named[TOKEN_TYPES] = self._token_types(table, token_rows, positions)
        if embeds is not None:
            named[EMBED_ROWS] = embeds.index
        unknown = last_tokens.unknown(token_rows, positions) if last_tokens is not None else _NONE
        if size is not None:
            rows = outputs = rows.padded(size)
            further = np.arange(size.num_tokens - num_tokens, dtype=np.int32) % size.max_query_len
            token_ids, positions = _with_zeros(token_ids, size.num_tokens), np.concatenate([positions, further])
            slots = [_with_zeros(of_group, size.num_tokens) for of_group in slots]
            if size.gives_all_logits:
                logits_index = _with_zeros(logits_index, size.num_tokens)
            named = {
                name: _with_zeros(array, len(logits_index) if name == LOGITS_ADAPTERS else size.num_tokens)
                for name, array in named.items()
            }
        if output_index is None:
            output_index = np.arange(len(positions))
        cross = CrossRows.of(table, token_rows, states, block_size) if table.cross_groups else None
        drafted = DraftedStates.of(table, output, rows) if table.state_groups and output.drafts else None
        cross_outputs = cross if cross is None or outputs is rows else cross.select(output_index)
        has_all_states = _counts_up(states_index, len(output_index))
        at = positions if table.rotary is None else table.rotary.of(token_rows, positions)
        params = draw_params(table, draw_rows, draw_positions)

        # What the forward reads comes first: in all padded steps of a size, it is at the same addresses.
        memory = None
        if size is not None and self.padding is not None:
            if self._memory is None:
                num_bytes = self.padding.num_bytes(block_size, len(slots))
                self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            memory = self._memory
        of_tokens, of_slots, of_rows, of_outputs, of_named, of_params, *others = parts_to_device(
            [
                [token_ids, at, output_index],
                slots,
                rows.arrays,
                [] if outputs is rows else outputs.arrays,
                [*named.values(), logits_index],  # those of logits last: a graph may leave them out
                [] if params is None else params.columns,
                [draw_rows.astype(np.int64), *([] if draw_logits is None else [draw_logits])],
                [states_index, *states_adapters],
                [unknown, token_rows[unknown].astype(np.int64)],
                [] if cross is None else cross.arrays,
                [] if cross_outputs is None or cross_outputs is cross else cross_outputs.arrays,
                [] if drafted is None else drafted.arrays,
            ],
            self.device,
            memory,
        )
        of_draws, of_states, of_unknown, of_cross, of_cross_outputs, of_drafted = others
        if last_tokens is not None and unknown.size:
            whose, their_rows = of_unknown
            of_tokens[0].index_copy_(0, whose, last_tokens.tokens.index_select(0, their_rows))
        metadata = rows.metadata(of_slots, of_rows)
        output_metadata = metadata if outputs is rows else outputs.metadata(of_slots, of_outputs)
        if cross is not None and cross_outputs is not None:
            is_all, groups = cross_outputs is cross, table.cross_groups
            metadata = cross.among(metadata, groups, of_cross)
            output_metadata = metadata if is_all else cross_outputs.among(output_metadata, groups, of_cross_outputs)
        if drafted is not None:
            metadata = drafted.among(metadata, table.state_groups, of_drafted)
        inputs = {
            name: Input(tensor, _DOMAINS.get(name, Domain.TOKENS))
            for name, tensor in zip(named, of_named, strict=False)
        }
        if embeds is not None:
            inputs[EMBEDS] = Input(embeds.values, Domain.EMBEDS)
        if states is not None:
            inputs[ENCODER_STATES] = Input(states.values, Domain.ENCODER)
        return StepInputs(
            batch=ForwardBatch(
                of_tokens[0],
                of_tokens[1],
                metadata,
                OutputRows(of_tokens[2], output_metadata),
                of_named[-1],
                inputs,
                num_layers,
            ),
            size=size,
            draw_rows=draw_rows,
            draw_positions=draw_positions,
            draw_logits=None if draw_logits is None else of_draws[1],
            draw_index=of_draws[0],
            draw_params=None if params is None else replace(params, on_device=tuple(of_params)),
            num_logits=num_logits,
            num_draws=num_draws,
            prompt_rows=prompt_rows,
            pooled=pooled,
            states_index=None if has_all_states else of_states[0],
            states_adapters=of_states[1] if states_adapters else None,
        )

    def _token_types(self, table: TableMirror, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the types of tokens at `positions` of `rows`: 1 in the second text of a pair, else 0; int32 [n]."""
        types = np.zeros(len(positions), np.int32)
        if self._num_token_types > 1:
            types[:] = positions >= table.pair_start[rows]
        return types


def _draws(
    output: SchedulerOutput, step_rows: BatchRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
    """Return the tokens to sample: their rows and positions (int32 [num_draws]), and which logits each is drawn from.

    Those are int64 [num_draws], None if draw i has logits i. Return also the batch's tokens with logits (int64), and
    the number of draws of each sample row (int32).
    """
    index, query_start, seq_lens = output.sample_index, step_rows.query_start, step_rows.seq_lens
    num = np.ones(len(index), np.int32)
    rows, positions = output.sample_rows, seq_lens[index]
    logits_index = query_start[index + 1].astype(np.int64) - 1
    if output.drafts:
        num += num_drafts(output)[index]
        ends = np.cumsum(num)
        # Distance of each draw from the last position of its sample row: num - 1 .. 0.
        back = np.repeat(ends, num) - 1 - np.arange(ends[-1] if ends.size else 0)
        rows, positions = np.repeat(rows, num), (np.repeat(positions, num) - back).astype(np.int32)
        logits_index = np.repeat(logits_index, num) - back
    if not output.forks:
        return rows, positions, None, logits_index, num
    shared, logits = np.unique(logits_index, return_inverse=True)
    return rows, positions, logits, shared, num


def draw_params(table: TableMirror, rows: np.ndarray, positions: np.ndarray) -> DrawParams | None:
    """Return how the tokens at `positions` of `rows` (int32 [n]) are drawn; None if all are greedy."""
    temperature = table.temperature[rows]
    if not temperature.any():
        return None
    uniform = uniforms(table.seeds[rows], positions)
    return DrawParams(temperature, table.top_k[rows], table.top_p[rows], table.min_p[rows], uniform)


def _wanted_states(
    table: TableMirror, output: SchedulerOutput, query_start: np.ndarray, pooling: PoolingKind
) -> tuple[tuple[tuple[int, int, int], ...], tuple[PooledChunk, ...], np.ndarray]:
    """Return StepInputs.prompt_rows, StepInputs.pooled, and the batch's tokens whose states these need (int64)."""
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
    return tuple(prompt_rows), tuple(pooled), np.concatenate(index) if index else _NONE


def _counts_up(index: np.ndarray, to: int) -> bool:
    """Return whether `index` is 0 .. to - 1."""
    return len(index) == to and bool((index == np.arange(to)).all())


def _with_zeros(array: np.ndarray, length: int) -> np.ndarray:
    """Return `array` [n] with zeros after it: [length]."""
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer


class LastTokens:
    """The last sampled token of each row, on the device, where the next step finds it before the host knows it.

    tokens: int32 [max_rows], on the device.
    positions: int32 [max_rows], of the row's token that the host does not know; -1 if there is none.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.positions = np.full(max_rows, -1, np.int32)

    def keep(self, rows: np.ndarray, positions: np.ndarray, index: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep a step's tokens, one for each of `rows`, as not known to the host.

        rows, positions: int32 [n].   index: `rows` on the device, int64.   tokens: int64 [n], on the device.
        """
        self.tokens.index_copy_(0, index, tokens.to(torch.int32))
        self.positions[rows] = positions

    def unknown(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return which of the tokens at `positions` of `rows` (int32 [n]) only the device has: int64 indices."""
        return np.flatnonzero(self.positions[rows] == positions)


@dataclass(frozen=True, slots=True, eq=False)
class StepEmbeds:
    """Embeddings of one step.   values: [n, hidden].   index: int64 [n], which of the step's tokens each is of.

    last_seen: int32 [n], the last position that each of these tokens sees, if that is after its own; None: for none.
    """

    values: torch.Tensor
    index: np.ndarray
    last_seen: np.ndarray | None = None


def join_embeds(parts: Sequence["StepEmbeds | None"]) -> "StepEmbeds | None":
    """Return embeddings of different tokens of a step as one."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    seen = None
    if any(part.last_seen is not None for part in found):
        own = (np.zeros(len(part.index), np.int32) if part.last_seen is None else part.last_seen for part in found)
        seen = np.concatenate(list(own))
    values, index = torch.cat([part.values for part in found]), np.concatenate([part.index for part in found])
    return StepEmbeds(values, index, seen)


class RowEmbeds:
    """Holds the embeddings of the rows whose prompts are not computed up to their last one, in the compute type."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._of_row: dict[int, tuple[np.ndarray, torch.Tensor]] = {}  # positions and values, as PromptEmbeds

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events. A fork needs nothing: its prompt is computed."""
        for row in output.released.tolist():
            self._of_row.pop(row, None)
        for init in output.admitted:
            self._of_row.pop(init.row, None)
            if (embeds := init.prompt_embeds) is not None and init.num_computed < embeds.end:
                # torch warns of arrays that cannot be written to, as those from another process; this copies.
                given = torch.tensor(embeds.values, dtype=self._dtype)
                self._of_row[init.row] = embeds.positions, given.to(self._device)

    def take(self, output: SchedulerOutput) -> StepEmbeds | None:
        """Return the embeddings that the step needs, None for none; drop those of prompts that it computes to the end.

        `output` must have been applied.
        """
        if not self._of_row:
            return None
        ends = np.cumsum(output.num_new)
        values: list[torch.Tensor] = []
        index: list[np.ndarray] = []
        for i in np.flatnonzero(np.isin(output.rows, list(self._of_row))).tolist():
            row, start, num_new = int(output.rows[i]), int(output.start[i]), int(output.num_new[i])
            positions, of_row = self._of_row[row]
            first, last = np.searchsorted(positions, (start, start + num_new))
            if first < last:
                values.append(of_row[first:last])
                index.append(positions[first:last].astype(np.int64) + (int(ends[i]) - num_new - start))
            if last == len(positions):
                del self._of_row[row]
        if not values:
            return None
        return StepEmbeds(torch.cat(values) if len(values) > 1 else values[0], np.concatenate(index))
