"""The two records that cross between scheduler and worker, and the one that goes to clients. All frozen.

SchedulerOutput carries arrays for what every step has (rows that run) and tuples of small records for what is rare
(events). A worker that applied every earlier SchedulerOutput needs nothing else: rows it knows are named by number.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from pagoda.base.sampling_params import PoolingParams, SamplingParams
from pagoda.core.request import LoraRef, MediaItem, RequestStatus

NO_INTS = np.empty(0, np.int32)
NO_PAIRS = np.empty((0, 2), np.int32)


class AdmitKind(IntEnum):
    NEW = 0
    RESUMED = 1  # was preempted by recompute
    SWAPPED_IN = 2  # its KV comes back through `swap_in` of the same step


@dataclass(frozen=True, slots=True, eq=False)
class RowInit:
    """Everything a worker must know to run a row it does not know (or no longer knows).

    token_ids: int32 [num_tokens], prompt then output.   num_computed: tokens whose KV is in the cache already.
    block_ids: per KV group, int32 [num_blocks]; 0 is the null block (given back behind a window).
    seed: of this branch (request seed + branch).
    """

    row: int
    request_id: str
    branch: int
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


@dataclass(frozen=True, slots=True)
class RowFork:
    """Row `dst` becomes a copy of row `src` (tokens, block tables, parameters) but for branch number and seed."""

    src: int
    dst: int
    branch: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockDelta:
    """Blocks set in tables in this step, as parallel arrays int32 [m]: table[group][row, index] = block_id.

    Covers growth and copy-on-write replacements of rows the worker knows; RowInit carries its own tables.
    """

    rows: np.ndarray = field(default_factory=lambda: NO_INTS)
    groups: np.ndarray = field(default_factory=lambda: NO_INTS)
    index: np.ndarray = field(default_factory=lambda: NO_INTS)
    block_ids: np.ndarray = field(default_factory=lambda: NO_INTS)


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """Run the encoder for item `item` of row `row` before this step's forward and keep the output by its hash."""

    row: int
    item: int
    content_hash: str


@dataclass(frozen=True, slots=True)
class Finish:
    """One branch of a request ended. The last branch's Finish has `request_done`.

    stop_reason: the stop token id where one ended it (eos: None).   message: for IGNORED and ERROR, readable by users.
    num_preemptions: of its request, so far.
    """

    request_id: str
    handle: int
    branch: int
    status: RequestStatus
    stop_reason: int | None = None
    request_done: bool = True
    message: str | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """What one step shall do.

    A worker applies it in this order: `released`; `swap_out`, `swap_in`, `copies` (block moves, in that order);
    `admitted`; `block_delta`; `forks`; encoder runs; then, layer by layer, writes all KV of the batch before it reads
    any (a row may read blocks that another row of the same step fills); then samples.

    step: number of this step, counts from 1.
    rows, start, num_new: int32 [num_rows]; row `rows[i]` computes positions start[i] .. start[i] + num_new[i] - 1.
        Tokens at those positions are known to the worker: prompt (RowInit), its own samples of earlier steps,
        or `drafts` of this step.
    sample_rows, sample_index: int32 [num_samples]; sample_rows[j] takes a token from the logits of the last position of
        rows[sample_index[j]] (its own, or, for a fresh fork, its source's). A row with k drafts is verified at its last
        k+1 positions. Pooled rows take no token and are never among them.
    drafts: row -> draft tokens int32 [k], already counted in num_new, standing at the last k positions.
    swap_out, swap_in: int32 [k, 2] (source block, destination block), device -> host and host -> device.
    copies: int32 [k, 2], device block -> device block (copy-on-write).
    released: rows the worker may forget; a row number may reappear in `admitted` or `forks` of this very step.
    num_common_prefix_blocks: per KV group, leading blocks shared by all running rows.
    """

    step: int
    rows: np.ndarray
    start: np.ndarray
    num_new: np.ndarray
    sample_rows: np.ndarray
    sample_index: np.ndarray
    total_num_scheduled_tokens: int
    admitted: tuple[RowInit, ...] = ()
    forks: tuple[RowFork, ...] = ()
    released: np.ndarray = field(default_factory=lambda: NO_INTS)
    block_delta: BlockDelta = field(default_factory=BlockDelta)
    swap_out: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    swap_in: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    copies: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    encoder_runs: tuple[EncoderRun, ...] = ()
    encoder_freed: tuple[str, ...] = ()
    num_common_prefix_blocks: tuple[int, ...] = ()
    num_lookahead_slots: int = 0
    running_queue_size: int = 0
    preempted_ids: tuple[str, ...] = ()
    finished_ids: tuple[str, ...] = ()  # ended since the last SchedulerOutput, aborts included; told once
    ignored: tuple[Finish, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to compute. Legal while requests are unfinished; events may still have to be applied."""
        return len(self.rows) == 0


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of n sampled positions, most likely first behind the chosen token.

    token_ids: int32 [n, 1 + k], column 0 is the chosen token.   logprobs: float32 [n, 1 + k].
    ranks: int32 [n], 1 is best.
    Rows that asked for fewer than k are cut by the reader.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class ModelRunnerOutput:
    """What one step gave, in the order of SchedulerOutput.sample_rows.

    sampled: int32 [num_samples, 1 + max drafts], padded with -1.
    num_sampled: int32 [num_samples], accepted drafts + 1.
    logprobs: for every sampled token in the order of `sampled` flattened without padding, or None when nobody asked.
    prompt_logprobs: row -> columns for the prompt positions computed in this step that have a next prompt token.
    pooled: row -> float32 vector.   failed: row -> message, for a row whose numbers are no longer finite.
    duration_s: execution time of the step, for the delay factor and the cost model.
    swap_s: the part of it that swap copies took.
    """

    step: int
    sampled: np.ndarray
    num_sampled: np.ndarray
    logprobs: LogprobColumns | None = None
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    duration_s: float = 0.0
    swap_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class EngineCoreOutputs:
    """What one client gets to hear of one step: columns, one entry a branch that emitted.

    handles: int64 [n] (Request.handle).   branches: int32 [n].   counts: int32 [n] tokens emitted.
    token_ids: int32 [sum(counts)], flat.   logprobs: rows in the order of token_ids, or None.
    prompt_logprobs, pooled: by handle.   finishes: branches that ended with this step, last tokens included above.
    num_cached_tokens, queue_s: handle -> prompt tokens found in the prefix cache, and seconds from arrival to the first
        step; told once, with the first emission.
    """

    handles: np.ndarray
    branches: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray
    finishes: tuple[Finish, ...] = ()
    logprobs: LogprobColumns | None = None
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    queue_s: dict[int, float] = field(default_factory=dict)
