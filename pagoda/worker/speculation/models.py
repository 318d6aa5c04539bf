"""Drafts that a model draws, one token after the other, for several rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.core.scheduler_output import NO_INTS, SchedulerOutput
from pagoda.kernels.batch import KVLayer
from pagoda.worker.adapters import Adapters
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.sampler import Drawn, Sampler
from pagoda.worker.speculation.drafter import GRADE_OF_MODEL, MAX_DRAFT_STEP_TOKENS, NO_DRAFT, Draft
from pagoda.worker.staging import LastTokens, StepInputs, draw_params
from pagoda.worker.table_mirror import TableMirror


@dataclass(frozen=True, slots=True, eq=False)
class DraftForward:
    """A forward pass that drafts.

    table: the token ids and block tables that it reads.   kv: its caches.
    num_layers: run only so many of the first layers; 0: all.   adapters: of the rows, which `forward` adapts; or None.
    """

    forward: ForwardRunner
    table: TableMirror
    kv: Sequence[KVLayer]
    num_layers: int = 0
    adapters: Adapters | None = None

    @property
    def device(self) -> torch.device:
        return self.forward.staging.device

    def compute(self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> None:
        """Write the KV of tokens start .. start + num_new - 1 of each row; int32 [num_rows] each."""
        self._run(rows, start, num_new, NO_INTS, None)

    def logits(
        self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray, last_tokens: LastTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `compute`; return the logits after the last token of each row, float32 [num_rows, V].

        Return also `rows` on the device, int64.   last_tokens: may have tokens that `table` does not have yet.
        """
        inputs, logits = self._run(rows, start, num_new, np.arange(len(rows), dtype=np.int32), last_tokens)
        assert logits is not None
        return logits[: len(rows)], inputs.draw_index

    def _run(
        self,
        rows: np.ndarray,
        start: np.ndarray,
        num_new: np.ndarray,
        samples: np.ndarray,
        last_tokens: LastTokens | None,
    ) -> tuple[StepInputs, torch.Tensor | None]:
        step = SchedulerOutput(0, rows, start, num_new, rows[samples], samples, int(num_new.sum()))
        slots = self.adapters.slots_of(rows) if self.adapters is not None else None
        inputs = self.forward.staging.fill(self.table, step, slots, last_tokens=last_tokens, num_layers=self.num_layers)
        return inputs, self.forward.run(inputs.batch, self.kv, inputs.size).logits


def roll_out(
    draft: DraftForward, target: TableMirror, sampler: Sampler, rows: np.ndarray, start: np.ndarray, most: np.ndarray
) -> list[np.ndarray]:
    """Return most[i] tokens (int32), at least 1, for each of `rows`, drawn one after the other.

    There are fewer if logits are not finite.
    start: int32 [num_rows], first position whose KV `draft` does not have; all tokens up to the end are known.
    Draws use the row's own parameters and random numbers, by position: where both models agree on the probabilities,
    they draw the same tokens. Tokens are written to `target` after its known ones, where a step's drafts belong.
    They stay on the device until the last is drawn, unless the host needs earlier ones: for penalties, bad words.
    """
    drawn = _RolledOut(draft, target, rows, most)
    last_tokens = LastTokens(len(target.num_tokens), draft.device)
    for number in range(int(most.max())):
        active = np.flatnonzero(most > number)
        at = rows[active]
        ends = target.num_tokens[at] + number
        begin = ends - 1 if number else start[active]
        logits, on_device = draft.logits(at, begin, ends - begin, last_tokens)
        tokens = sampler.draw(logits, target, at, ends, None, draw_params(target, at, ends))
        last_tokens.keep(at, ends, on_device, tokens.tokens)
        drawn.add(active, tokens)
        if target.reads_output[at].any():
            drawn.collect()
    drawn.collect()
    return drawn.tokens


class _RolledOut:
    """Tokens that are drawn step by step, and collected when the host needs them."""

    def __init__(self, draft: DraftForward, target: TableMirror, rows: np.ndarray, most: np.ndarray) -> None:
        self._tables = target, draft.table
        self._rows = rows
        self._ends = target.num_tokens[rows]
        self._tokens = np.zeros((len(rows), int(most.max())), np.int32)
        self._num_finite = most.copy()  # tokens up to the first whose logits were not
        self._number = 0  # tokens of each row that have been collected
        self._pending: list[tuple[np.ndarray, Drawn]] = []

    def add(self, active: np.ndarray, drawn: Drawn) -> None:
        """Add a token for some of the rows.   active: indices of those."""
        self._pending.append((active, drawn))

    def collect(self) -> None:
        """Wait for the tokens, and write them to the tables."""
        for active, drawn in self._pending:
            tokens, best = (tensor.cpu().numpy() for tensor in (drawn.tokens, drawn.best))
            self._tokens[active, self._number] = tokens
            self._num_finite[active] = np.where(
                np.isfinite(best), self._num_finite[active], np.minimum(self._num_finite[active], self._number)
            )
            for table in self._tables:
                table.token_ids[self._rows[active], self._ends[active] + self._number] = tokens
            self._number += 1
        self._pending.clear()

    @property
    def tokens(self) -> list[np.ndarray]:
        return [row[:count] for row, count in zip(self._tokens, self._num_finite.tolist(), strict=True)]


class DraftModelDrafter:
    """A smaller model with the same vocabulary.

    Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; here a draft is right only if
    it equals the token that the large model draws.

    It keeps a KV cache of its own, which is filled for a row when the row is first drafted for.

    If no block is free, the row that was drafted for least recently loses its blocks, and is computed again later. A
    step catches up with at most MAX_DRAFT_STEP_TOKENS tokens of all rows; those that lack more get no draft yet.
    """

    runs_model = True

    def __init__(self, draft: DraftForward, sampler: Sampler, num_blocks: int) -> None:
        """draft: with a table of its own, which has the target's rows.   num_blocks: of its KV cache."""
        self._draft = draft
        self._sampler = sampler
        table = draft.table
        max_rows = len(table.num_tokens)
        self._num_computed = np.zeros(max_rows, np.int32)  # tokens of table.token_ids whose KV is in the cache
        self._num_blocks = np.zeros(max_rows, np.int32)  # per group
        self._free = list(range(num_blocks, 0, -1))
        self._used_at = np.zeros(max_rows, np.int64)
        self._now = 0

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Free the blocks of rows that end or begin."""
        for row in output.released.tolist():
            self._forget(row)
        for init in output.admitted:
            self._forget(init.row)
        for fork in output.forks:
            self._forget(fork.dst)

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        self._now += 1
        self._used_at[rows] = self._now
        drafts: list[Draft] = [NO_DRAFT] * len(rows)
        # The KV of the last drawn token is not needed: nothing is drawn after it.
        ends = table.num_tokens[rows] + most - 1
        fits = [self._make_room(row, end) for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        some = np.flatnonzero(fits)
        some = some[self._catch_up(table, rows[some])]
        if not some.size:
            return drafts
        at = rows[some]
        start = self._num_computed[at].copy()
        tokens = roll_out(self._draft, table, self._sampler, at, start, most[some])
        self._num_computed[at] = ends[some]
        for i, drawn in zip(some.tolist(), tokens, strict=True):
            drafts[i] = Draft(drawn, GRADE_OF_MODEL)
        return drafts

    def _catch_up(self, table: TableMirror, rows: np.ndarray) -> np.ndarray:
        """Share a step's tokens among the rows, those first that lack least; compute a chunk of one that lacks more.

        Return which rows can be drafted for (bool [num_rows]): what they lack is computed with their first draw.
        """
        for row in rows.tolist():
            self._copy_tokens(table, row)
        lacking = table.num_tokens[rows] - self._num_computed[rows]
        is_ready = np.zeros(len(rows), np.bool_)
        budget = MAX_DRAFT_STEP_TOKENS
        for i in np.argsort(lacking, kind="stable").tolist():
            if lacking[i] > budget:
                if budget:
                    start, count = self._num_computed[rows[i : i + 1]], np.array([budget], np.int32)
                    self._draft.compute(rows[i : i + 1], start, count)
                    self._num_computed[rows[i]] += budget
                break
            is_ready[i] = True
            budget -= int(lacking[i])
        return is_ready

    def _copy_tokens(self, table: TableMirror, row: int) -> None:
        """Take over the row's known tokens; forget drafts that were wrong. Its last token is never computed yet."""
        own = self._draft.table.token_ids[row]
        known = int(table.num_tokens[row])
        tokens = table.token_ids[row, :known]
        computed = min(int(self._num_computed[row]), known - 1)
        differs = np.flatnonzero(own[:computed] != tokens[:computed])
        self._num_computed[row] = differs[0] if differs.size else computed
        own[:known] = tokens

    def _make_room(self, row: int, end: int) -> bool:
        """Give the row blocks for positions below `end`. Return False if there are not enough."""
        tables, block_size = self._draft.table.block_tables, self._draft.table.block_size
        held, needed = int(self._num_blocks[row]), -(-end // block_size)
        while len(self._free) < (needed - held) * len(tables):
            idle = np.flatnonzero((self._num_blocks > 0) & (self._used_at < self._now))
            if not idle.size:
                return False
            self._forget(int(idle[np.argmin(self._used_at[idle])]))
        for index in range(held, needed):
            for table in tables:
                table[row, index] = self._free.pop()
        self._num_blocks[row] = max(held, needed)
        return True

    def _forget(self, row: int) -> None:
        for table in self._draft.table.block_tables:
            self._free += table[row, : self._num_blocks[row]].tolist()
        self._num_blocks[row] = self._num_computed[row] = 0


class LayerSkipDrafter:
    """The model's own first layers and its head: no second checkpoint and no second KV cache.

    Elhoushi et al., "LayerSkip", 2024, without the training: how often the drafts are right depends on the model.

    It drafts in the free slots of each row's last block: at least one token, since the last known one has a slot.

    Nothing is reserved for it, so a request never waits or ends for want of slots to draft in. Verifying the drafts
    overwrites what it writes there, so nothing else reads it. Until a copy-on-write, siblings may share such a slot;
    then their drafts get worse, and nothing else.
    """

    runs_model = True

    def __init__(self, draft: DraftForward, sampler: Sampler) -> None:
        """draft: the model's own forward pass, table and caches, with fewer layers."""
        self._draft = draft
        self._sampler = sampler
        tables = draft.table.block_tables
        self._block_size = draft.table.block_size
        self._num_blocks = np.zeros((len(tables), tables[0].shape[0]), np.int32)  # valid entries per group and row
        self._forked: set[int] = set()

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Follow how many blocks each row has: entries after them in the table are of earlier rows."""
        held = self._num_blocks
        held[:, output.released] = 0
        for init in output.admitted:
            held[:, init.row] = [len(ids) for ids in init.block_ids]
        delta = output.block_delta
        np.maximum.at(held, (delta.groups, delta.rows), delta.index + 1)
        self._forked.clear()
        for fork in output.forks:
            held[:, fork.dst] = held[:, fork.src]
            self._forked |= {fork.src, fork.dst}

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        start = table.num_tokens[rows] - 1
        slots = self._num_blocks[:, rows].min(0) * self._block_size
        most = np.minimum(most, slots - start)
        if self._forked:
            most = np.where(np.isin(rows, list(self._forked)), 0, most)
        drafts: list[Draft] = [NO_DRAFT] * len(rows)
        some = np.flatnonzero(most > 0)
        if some.size:
            tokens = roll_out(self._draft, table, self._sampler, rows[some], start[some], most[some])
            for i, drawn in zip(some.tolist(), tokens, strict=True):
                drafts[i] = Draft(drawn, GRADE_OF_MODEL)
        return drafts
