"""LayerSkipDrafter: the model's own first layers and its head. No second checkpoint and no second KV cache.

Elhoushi et al., "LayerSkip", 2024, without the training: how often the drafts are right depends on the model.
"""

from collections.abc import Sequence

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.drafters.drafter import GRADE_OF_MODEL, NO_DRAFT, Draft
from pagoda.worker.drafters.rollout import DraftForward, roll_out
from pagoda.worker.sampler import Sampler
from pagoda.worker.table_mirror import TableMirror


class LayerSkipDrafter:
    """Drafts in the free slots of each row's last block: at least one token, since the last known one has a slot.

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
        """Follow how many blocks each row has: entries after them in the table are leftovers of other rows."""
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
