"""The records between scheduler and workers, and what clients get. All frozen.

SchedulerOutput carries arrays for what every step has (rows that run) and tuples of small records for events. A worker
that applied every earlier SchedulerOutput needs nothing else: rows that it knows are named by number.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import ClientEvent, Ended, Events
from pagoda.core.request import AdmitKind, LoraRef, MediaItem, PromptEmbeds, RequestKey

NO_INTS = np.empty(0, np.int32)
NO_HANDLES = np.empty(0, np.int64)
NO_PAIRS = np.empty((0, 2), np.int32)
NO_EVENTS = Events()
MASKED_LOGPROB = -9999.0
"""The log-probability of a token that a grammar forbids; JSON has no -Infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class RowInit:
    """Everything a worker needs to run a row that it does not know (or no longer knows).

    token_ids: int32 [num_tokens], prompt then output.   num_computed: tokens whose KV is in the cache already.
    block_ids: per KV group, int32 [num_blocks]; 0 is the null block (freed: out of the window).
    sequence: its index in the request.   seed: of this sequence (request seed + index).
    cache_salt: of its request; what is learnt from this row's text may only be used for rows with the same salt.
    prompt_embeds, key: of its request.   media: of its request, without features.
    """

    row: int
    request_id: str
    sequence: int
    kind: AdmitKind
    token_ids: np.ndarray
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[np.ndarray, ...]
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams | None = None
    pooling: PoolingParams | None = None
    lora: LoraRef | None = None
    media: tuple[MediaItem, ...] = ()
    encoder_len: int = 0
    cache_salt: str | None = None
    prompt_embeds: PromptEmbeds | None = None
    key: RequestKey = (0, 0)


@dataclass(frozen=True, slots=True)
class RowFork:
    """Row `dst` becomes a copy of row `src` (tokens, block tables, parameters) except for sequence index and seed."""

    src: int
    dst: int
    sequence: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class BeamRows:
    """Beams that were chosen since the last step, as parallel arrays int32 [m].

    rows[i] has the tokens before positions[i], and the block tables, that sources[i] had before this step (itself, or
    another row of its request, which continues too), and tokens[i] at positions[i], whatever was sampled there.
    """

    rows: np.ndarray = field(default_factory=lambda: NO_INTS)
    sources: np.ndarray = field(default_factory=lambda: NO_INTS)
    positions: np.ndarray = field(default_factory=lambda: NO_INTS)
    tokens: np.ndarray = field(default_factory=lambda: NO_INTS)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, row) where a row continues as another one."""
        return [
            (source, row)
            for source, row in zip(self.sources.tolist(), self.rows.tolist(), strict=True)
            if source != row
        ]


NO_BEAMS = BeamRows()


@dataclass(frozen=True, slots=True, eq=False)
class RowTokens:
    """Tokens of rows, as parallel arrays int32 [m]: row rows[i] has tokens[i] at positions[i], ascending per row."""

    rows: np.ndarray = field(default_factory=lambda: NO_INTS)
    positions: np.ndarray = field(default_factory=lambda: NO_INTS)
    tokens: np.ndarray = field(default_factory=lambda: NO_INTS)


NO_TOKENS = RowTokens()


@dataclass(frozen=True, slots=True, eq=False)
class BlockDelta:
    """Blocks set in tables in this step, as parallel arrays int32 [m]: table[group][row, index] = block_id.

    Covers growth and copy-on-write replacements of rows the worker knows; RowInit carries its own tables.
    """

    rows: np.ndarray = field(default_factory=lambda: NO_INTS)
    groups: np.ndarray = field(default_factory=lambda: NO_INTS)
    index: np.ndarray = field(default_factory=lambda: NO_INTS)
    block_ids: np.ndarray = field(default_factory=lambda: NO_INTS)


NO_DELTA = BlockDelta()


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """Row `row` needs the encoder's output for its item `item` in this step.

    Workers keep it by its hash; what they do not have they compute before the forward, see `encoder_inputs`.
    """

    row: int
    item: int
    content_hash: str


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """What one step does.

    A worker applies it in this order: `released`; `swap_out`, `swap_in`, `copies` (block moves, in that order);
    `admitted`; `decided`; `beams`; `block_delta`; `forks`; `encoder_freed`, `encoder_inputs`; then, layer by layer,
    writes all KV of the batch before it reads any (a row may read blocks that another row fills in the same step);
    then samples.

    step: number of this step, counts from 1.
    rows, start, num_new: int32 [num_rows]; row `rows[i]` computes positions start[i] .. start[i] + num_new[i] - 1.
        Tokens at those positions are known to the worker: prompt (RowInit), its own samples of earlier steps (or
        `decided`, if it does not sample), or `drafts` of this step.
    sample_rows, sample_index: int32 [num_samples]; sample_rows[j] takes a token from the logits of the last position of
        rows[sample_index[j]] (its own, or, for a fresh fork, its source's). A row with k drafts is verified at its last
        k+1 positions. Pooled rows take no token and are never among them.
    decided: tokens that earlier steps gave to `rows`, for workers that do not sample; each is sent once, with the row's
        next step. Empty without such workers (SchedulerOptions.has_followers).
    drafts: row -> draft tokens int32 [k], already counted in num_new, at the last k positions.
    swap_out, swap_in: int32 [k, 2] (source block, destination block), device -> host and host -> device.
    copies: int32 [k, 2], device block -> device block (copy-on-write).
    released: rows the worker may forget; a row number may reappear in `admitted` or `forks` of this very step.
    encoder_freed: content hashes of encoder outputs to drop; one of them may run again in this very step.
    encoder_inputs: items of `encoder_runs` whose outputs are to be computed, each content once, with their features,
        which travel nowhere else.
    """

    step: int
    rows: np.ndarray
    start: np.ndarray
    num_new: np.ndarray
    sample_rows: np.ndarray
    sample_index: np.ndarray
    total_num_scheduled_tokens: int
    admitted: tuple[RowInit, ...] = ()
    decided: RowTokens = NO_TOKENS
    beams: BeamRows = NO_BEAMS
    forks: tuple[RowFork, ...] = ()
    released: np.ndarray = field(default_factory=lambda: NO_INTS)
    block_delta: BlockDelta = NO_DELTA
    swap_out: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    swap_in: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    copies: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    encoder_runs: tuple[EncoderRun, ...] = ()
    encoder_freed: tuple[str, ...] = ()
    encoder_inputs: tuple[MediaItem, ...] = ()
    preempted: tuple[RequestKey, ...] = ()
    finished: tuple[RequestKey, ...] = ()  # ended since the last SchedulerOutput, aborts included; sent once

    @property
    def is_empty(self) -> bool:
        """Nothing to compute. Legal while requests are unfinished; events may still have to be applied."""
        return len(self.rows) == 0

    @property
    def has_events(self) -> bool:
        """Whether workers need it even though it schedules no tokens."""
        return bool(
            self.released.size
            or self.admitted
            or self.forks
            or self.beams.rows.size
            or len(self.swap_out)
            or len(self.swap_in)
            or len(self.copies)
            or self.block_delta.rows.size
            or self.encoder_freed
            or self.encoder_inputs
            or self.finished
        )


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of n sampled positions, the chosen token, then the most likely ones.

    token_ids: int32 [n, 1 + k], column 0 is the chosen token.   logprobs: float32 [n, 1 + k].
    ranks: int32 [n], 1 is best.
    Readers cut rows that asked for fewer than k.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def __getitem__(self, positions: np.ndarray) -> "LogprobColumns":
        """Return some of the positions."""
        return LogprobColumns(self.token_ids[positions], self.logprobs[positions], self.ranks[positions])


@dataclass(frozen=True, slots=True, eq=False)
class ModelRunnerOutput:
    """The results of one step, in the order of SchedulerOutput.sample_rows.

    sampled: int32 [num_samples, 1 + max drafts], padded with -1.
    num_sampled: int32 [num_samples], accepted drafts + 1.
    logprobs: for every sampled token in the order of `sampled` flattened without padding, or None if no request asked.
    prompt_logprobs: row -> columns for the prompt positions computed in this step that have a next prompt token.
    pooled: row -> float32 vector.   failed: row -> message, for a row that cannot continue.
    refused: rows among the failed whose request is at fault; for the others, the engine is.
    duration_s: execution time of the step, for the delay factor and the cost model.
    swap_s: the part of it that swap copies took.
    drafts: row -> tokens (int32 [k]) that a drafter proposes to verify in the next step.
    no_drafts_until: the last step (inclusive) whose result will certainly propose none, 0 if that is not known.
    checksum: of the lengths of the step's rows, equal on all ranks; 0 if there is one rank.
    A rank that does not sample returns nothing but step, checksum and duration_s.
    """

    step: int
    sampled: np.ndarray
    num_sampled: np.ndarray
    logprobs: LogprobColumns | None = None
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()
    duration_s: float = 0.0
    swap_s: float = 0.0
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    no_drafts_until: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EngineCoreOutputs:
    """What one client gets of one step: columns, one entry per sequence that emitted.

    handles: int64 [n] (Request.handle).   sequences: int32 [n], indices in their requests.
    counts: int32 [n], tokens emitted.
    token_ids: int32 [sum(counts)], flat.   logprobs: rows in the order of token_ids, or None.
    prompt_logprobs, pooled: by handle.
    events: what happened to its requests since its last outputs. Of a sequence that ended, the last tokens are above.
    scheduler_s: that the scheduler has taken since the engine began; 0 if that is not known.
    """

    handles: np.ndarray
    sequences: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray
    events: Events = NO_EVENTS
    logprobs: LogprobColumns | None = None
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    scheduler_s: float = 0.0

    def entries(self, mine: np.ndarray) -> "EngineCoreOutputs":
        """Return the entries of the sequences in the mask, with nothing but their tokens."""
        tokens = np.repeat(mine, self.counts)
        logprobs = self.logprobs[tokens] if self.logprobs is not None else None
        return EngineCoreOutputs(
            self.handles[mine], self.sequences[mine], self.counts[mine], self.token_ids[tokens], logprobs=logprobs
        )

    @property
    def ends(self) -> list[Ended]:
        """Return the ends of sequences among the events."""
        return [event for event in self.events if isinstance(event, Ended)]


def only_events(events: Iterable[ClientEvent]) -> EngineCoreOutputs:
    """Return outputs without tokens."""
    return EngineCoreOutputs(NO_HANDLES, NO_INTS, NO_INTS, NO_INTS, Events(events))


def join_outputs(parts: Iterable[EngineCoreOutputs]) -> EngineCoreOutputs:
    """Return the outputs of several parts of one step for one client, one after the other."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return EngineCoreOutputs(
        np.concatenate([part.handles for part in parts]),
        np.concatenate([part.sequences for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        Events(event for part in parts for event in part.events),
        _join_columns(parts),
        {handle: value for part in parts for handle, value in part.prompt_logprobs.items()},
        {handle: value for part in parts for handle, value in part.pooled.items()},
    )


def _join_columns(parts: list[EngineCoreOutputs]) -> LogprobColumns | None:
    """Narrower columns, and tokens without any, are filled up with zeros; readers take what they asked for."""
    width = max((part.logprobs.token_ids.shape[1] for part in parts if part.logprobs is not None), default=0)
    if not width:
        return None
    count = sum(len(part.token_ids) for part in parts)
    ids, values = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    ranks, at = np.zeros(count, np.int32), 0
    for part in parts:
        rows, columns = slice(at, at + len(part.token_ids)), part.logprobs
        if columns is not None:
            filled = columns.token_ids.shape[1]
            ids[rows, :filled], values[rows, :filled], ranks[rows] = columns.token_ids, columns.logprobs, columns.ranks
        at = rows.stop
    return LogprobColumns(ids, values, ranks)
