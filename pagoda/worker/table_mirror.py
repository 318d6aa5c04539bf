"""TableMirror: the worker's copy of the scheduler's rows, in host memory, updated only by SchedulerOutput.

The columns are numpy arrays. For a GPU, a step's inputs are gathered here and transferred in one copy,
which is cheaper than updating a second table on the device with small kernels.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from pagoda.base.config import LogprobsMode
from pagoda.base.pooling import PoolingParams
from pagoda.core.kv import KVGroupSpec, by_pool
from pagoda.core.request import MediaItem, num_beam_candidates
from pagoda.core.scheduler_output import BeamRows, RowFork, RowInit, SchedulerOutput
from pagoda.models.base import POSITION_KINDS, Model
from pagoda.worker.constraints import RowConstraints, TokenCounts

# Columns with one number per row that a fork copies.
_COLUMNS = (
    "num_prompt",
    "num_encoder",
    "num_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence",
    "frequency",
    "repetition",
    "num_logprobs",
    "has_logprob_ids",
    "logprobs_after",
    "logprobs_processed",
    "reports_logits",
)


_NO_PAIR = 2**31 - 1


class TableMirror:
    """The worker's state of each row, by row number.

    token_ids: int32 [max_rows, max_len], prompt, then sampled tokens (the worker's own, or those that steps bring),
        then drafts of the current step.
    block_tables: per KV group, int32 [max_rows, max_blocks].   seeds: uint64 [max_rows].
    num_tokens: int32 [max_rows], known tokens in token_ids (without drafts).
    num_encoder: int32 [max_rows], encoder tokens, of an encoder-decoder model.
    cross_groups: the KV groups of cross attention, whose tables hold encoder tokens.   growing_tables: of the others.
    state_groups: the KV groups of recurrent layers.
    num_logprobs, num_prompt_logprobs: int32 [max_rows], requested top entries, -1 for none.
    logprob_ids: per row, int64 array of the tokens to report in place of them, or None.   has_logprob_ids: bool
        [max_rows].
    constraints, pooling: per row, or None.   constrained: bool [max_rows], rows with constraints.
    reads_output: bool [max_rows], rows whose constraints depend on which tokens were sampled before.
    logprobs_after: bool [max_rows], rows whose log-probabilities are taken after the constraints.
    logprobs_processed: bool [max_rows], those of them where it is after the temperature and the filters, too.
    reports_logits: bool [max_rows], rows that report logits in place of log-probabilities.
    without_token: per row, int32 [n], prompt positions that are given as embeddings; None: none.
    token_counts: per row with penalties, else None; they count from `token_ids` when they are asked.
    wants_states: bool [max_rows], rows with prompt logprobs or pooling, which need hidden states of prompt positions.
    pair_start: int32 [max_rows], position of the second text of a pair; beyond every position without one.
    rotary: of a model whose tokens have positions of several kinds, else None.
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        block_size: int,
        num_groups: int,
        cross_groups: tuple[int, ...] = (),
        max_encoder_len: int = 0,
        rotary: "RotaryPositions | None" = None,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        first_ids: Sequence[int] = (),
        state_groups: Sequence[int] = (),
    ) -> None:
        """max_len: most tokens per row, including drafts.   max_encoder_len: most encoder tokens.

        logprobs_mode: of all rows but those of speech and of beam searches, which are ranked by log-probabilities.
        first_ids: see `first_ids_of`; empty: all groups have blocks of one pool.

        Memory pages are only touched when rows use them.
        """
        self.block_size = block_size
        self.token_ids = np.zeros((max_rows, max_len), np.int32)
        self.cross_groups, self.state_groups = cross_groups, state_groups
        self._first_ids = first_ids or (0,) * num_groups
        lengths = [max_encoder_len if group in cross_groups else max_len for group in range(num_groups)]
        # Drafts leave a state in the block after that of the tokens before them; tables of all groups grow together.
        widths = [-(-length // block_size) + 1 for length in lengths]
        self.block_tables = tuple(np.zeros((max_rows, width), np.int32) for width in widths)
        self.growing_tables = tuple(table for group, table in enumerate(self.block_tables) if group not in cross_groups)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.num_encoder = np.zeros(max_rows, np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.repetition = np.ones(max_rows, np.float32)
        self.num_logprobs = np.full(max_rows, -1, np.int32)
        self.num_prompt_logprobs = np.full(max_rows, -1, np.int32)
        self.has_logprob_ids = np.zeros(max_rows, np.bool_)
        self.logprob_ids: list[np.ndarray | None] = [None] * max_rows
        self.constrained = np.zeros(max_rows, np.bool_)
        self.reads_output = np.zeros(max_rows, np.bool_)
        self.logprobs_after = np.zeros(max_rows, np.bool_)
        self.logprobs_processed = np.zeros(max_rows, np.bool_)
        self.reports_logits = np.zeros(max_rows, np.bool_)
        self.wants_states = np.zeros(max_rows, np.bool_)
        self.constraints: list[RowConstraints | None] = [None] * max_rows
        self.token_counts: list[TokenCounts | None] = [None] * max_rows
        self.without_token: list[np.ndarray | None] = [None] * max_rows
        self.pooling: list[PoolingParams | None] = [None] * max_rows
        self.pair_start = np.full(max_rows, _NO_PAIR, np.int32)
        self.rotary = rotary
        self._logprobs_mode = logprobs_mode

    def apply(self, output: SchedulerOutput) -> None:
        """Apply the step's events to the rows, in SchedulerOutput's order. Loops over events, not over rows."""
        for row in output.released.tolist():
            self._clear(row)
        for init in output.admitted:
            self._admit(init)
        if output.decided.rows.size:
            self.record_tokens(output.decided.rows, output.decided.positions, output.decided.tokens)
        if output.beams.rows.size:
            self._continue_beams(output.beams)
        delta = output.block_delta
        if delta.rows.size:
            for group, table in enumerate(self.block_tables):
                of_group = delta.groups == group if len(self.block_tables) > 1 else slice(None)
                block_ids = np.maximum(delta.block_ids[of_group] - self._first_ids[group], 0)
                table[delta.rows[of_group], delta.index[of_group]] = block_ids
        for fork in output.forks:
            self._fork(fork)
        if self.rotary is not None:
            self.rotary.apply(output)
        if output.drafts:
            ends = dict(zip(output.rows.tolist(), (output.start + output.num_new).tolist(), strict=True))
            for row, drafts in output.drafts.items():
                self.token_ids[row, ends[row] - len(drafts) : ends[row]] = drafts

    def _continue_beams(self, beams: BeamRows) -> None:
        """Copy tokens and block tables of beams that continue in other rows too, then write the chosen tokens."""
        for source, row in beams.copies:
            end = self.num_tokens[source]
            self.token_ids[row, :end] = self.token_ids[source, :end]
            for table in self.block_tables:
                table[row] = table[source]
        self.record_tokens(beams.rows, beams.positions, beams.tokens)

    def record_tokens(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Write sampled tokens at their positions; the last one written to a row becomes its last known token.

        rows, positions, tokens: int [n]; positions of one row ascending.
        """
        self.token_ids[rows, positions] = tokens
        self.num_tokens[rows] = positions + 1

    def checksum(self, rows: np.ndarray) -> int:
        """Return a number that is equal for equal lengths of `rows`: 32 bits."""
        return zlib.crc32(self.num_tokens[rows].tobytes())

    def _clear(self, row: int) -> None:
        self.constraints[row] = self.token_counts[row] = self.without_token[row] = None
        self.pooling[row] = self.logprob_ids[row] = None
        self.has_logprob_ids[row] = False
        self.pair_start[row] = _NO_PAIR
        self.constrained[row] = self.reads_output[row] = self.wants_states[row] = False
        self.logprobs_after[row] = self.logprobs_processed[row] = self.reports_logits[row] = False
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = -1

    def _admit(self, init: RowInit) -> None:
        row = init.row
        self._clear(row)
        num_tokens = len(init.token_ids)
        self.token_ids[row, :num_tokens] = init.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt[row] = init.num_prompt_tokens
        self.without_token[row] = None if init.prompt_embeds is None else init.prompt_embeds.positions
        self.num_encoder[row] = init.encoder_len
        self.seeds[row] = init.seed & 0xFFFFFFFFFFFFFFFF
        for table, ids, first in zip(self.block_tables, init.block_ids, self._first_ids, strict=True):
            table[row, : len(ids)] = np.maximum(ids - first, 0)  # 0 stays the null block
        self.pooling[row] = init.pooling
        self.wants_states[row] = init.pooling is not None
        if init.pooling is not None and init.pooling.pair_start is not None:
            self.pair_start[row] = init.pooling.pair_start
        params = init.sampling
        if params is None:
            return
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        if params.logprob_token_ids is not None:
            self.logprob_ids[row] = np.array(params.logprob_token_ids, np.int64)
            self.has_logprob_ids[row] = True
        if params.beam_search is not None:
            needed = num_beam_candidates(params, init.eos_token_ids)
            self.num_logprobs[row] = max(needed, params.logprobs or 0)
        if params.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = params.prompt_logprobs
            self.wants_states[row] = True
        is_ranked, mode = params.speech is not None or params.beam_search is not None, self._logprobs_mode
        self.logprobs_processed[row] = not is_ranked and mode.is_processed
        self.logprobs_after[row] = params.speech is not None or self.logprobs_processed[row]
        self.reports_logits[row] = not is_ranked and mode.is_logits
        self._constrain(row, RowConstraints.of(params, init.eos_token_ids))

    def _constrain(self, row: int, constraints: RowConstraints | None) -> None:
        """Set the row's constraints; its penalties start to count anew. The columns must be set before."""
        self.constraints[row] = constraints
        self.constrained[row] = constraints is not None
        self.reads_output[row] = constraints is not None and constraints.reads_output
        counts = constraints is not None and constraints.has_penalty
        with_prompt = bool(self.repetition[row] != 1)
        self.token_counts[row] = self._new_counts(row, with_prompt) if counts else None

    def _new_counts(self, row: int, with_prompt: bool) -> TokenCounts:
        return TokenCounts(int(self.num_prompt[row]), with_prompt)

    def known_tokens(self, row: int, end: int) -> np.ndarray:
        """Return the row's tokens before `end`: int32, each position without a token as a negative number of its own.

        To be read only.
        """
        ids, positions = self.token_ids[row, :end], self.without_token[row]
        if positions is not None:
            ids = ids.copy()
            ids[positions] = ~positions
        return ids

    def _fork(self, fork: RowFork) -> None:
        src, dst = fork.src, fork.dst
        num_tokens = self.num_tokens[src]
        self.token_ids[dst, :num_tokens] = self.token_ids[src, :num_tokens]
        for table in self.block_tables:
            table[dst] = table[src]
        for name in _COLUMNS:
            column = getattr(self, name)
            column[dst] = column[src]
        self.num_prompt_logprobs[dst] = -1  # only returned for the sequence that computes the prompt
        self.wants_states[dst] = False
        self.seeds[dst] = fork.seed & 0xFFFFFFFFFFFFFFFF
        self._constrain(dst, self.constraints[src])
        self.pooling[dst], self.logprob_ids[dst] = self.pooling[src], self.logprob_ids[src]
        self.without_token[dst] = self.without_token[src]


def first_ids_of(groups: tuple[KVGroupSpec, ...], num_blocks: int) -> tuple[int, ...]:
    """Return what the scheduler's block ids of each group are shifted by: states follow the blocks of attention there,
    and begin at 1 in their own tensors.   num_blocks: of the first pool.
    """
    divides = len(by_pool(groups)) > 1
    return tuple(num_blocks if divides and group.has_states else 0 for group in groups)


class RotaryPositions:
    """A time, a row and a column for each token. They are a token's place among the row's tokens, but for images.

    They follow from a request's items alone, so that they are the same in any chunk, after a preemption or a restart.
    """

    def __init__(self, model: Model, max_rows: int) -> None:
        """model: says what positions an item has.   max_rows: of the table."""
        self._model, self._runs = model, np.array(model.position_runs)
        self._shift = np.zeros(max_rows, np.int32)  # position minus place of the tokens after a row's last item
        self._before: dict[int, np.ndarray] = {}  # of those up to it, while some are not computed: int32 [n, kinds]

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events."""
        for row in output.released.tolist():
            self._set(row, 0, None)
        for init in output.admitted:
            self._set(init.row, *(self._positions_of(init.media) if init.media else (0, None)))
        for fork in output.forks:
            self._set(fork.dst, int(self._shift[fork.src]), self._before.get(fork.src))

    def of(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the positions of the tokens at `places` of `rows` (int32 [n]), for each run of a head: [n, runs]."""
        found = np.repeat((places + self._shift[rows])[:, None], POSITION_KINDS, axis=1)
        for row in np.intersect1d(rows, np.fromiter(self._before, np.int32, len(self._before))).tolist():
            before = self._before[row]
            at = np.flatnonzero((rows == row) & (places < len(before)))
            found[at] = before[places[at]]
            if not at.size:
                del self._before[row]
        return np.take(found, self._runs, axis=1)

    def _set(self, row: int, shift: int, before: np.ndarray | None) -> None:
        self._shift[row] = shift
        self._before.pop(row, None)
        if before is not None:
            self._before[row] = before

    def _positions_of(self, media: Sequence[MediaItem]) -> tuple[int, np.ndarray]:
        """Return position minus place after the last item, and the positions up to there: int32 [n, kinds]."""
        parts: list[np.ndarray] = []
        place = position = 0
        for item in media:
            text = np.arange(position, position + item.offset - place, dtype=np.int32)
            own, taken = self._model.media_positions(item.grid)
            parts += [np.repeat(text[:, None], POSITION_KINDS, axis=1), own + position + len(text)]
            place, position = item.offset + item.length, position + len(text) + taken
        return position - place, np.concatenate(parts)
