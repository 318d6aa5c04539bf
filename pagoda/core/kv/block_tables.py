"""BlockTables: which blocks each row holds, as numpy columns. BlockAllocator alone writes them."""

import numpy as np

from pagoda.core.kv.sizing import KVGroup


class BlockTables:
    """The KV columns, one row per running sequence. (`num_cached` is next to the prefix cache, in CachedContent.)

    entries: per KV group, int32 [rows, max blocks]; 0 is the null block.
    num_blocks: int32 [rows], entries used in the tables of the groups that grow (they grow together).
    num_cross_blocks: int32 [rows], entries used in those that do not.
    num_released: per KV group, int32 [rows], leading blocks freed because the window has left them.
    reserved_until: int32 [rows]: while a step ends at or below this position, the row needs nothing from the KV
        manager: no block, no copy, nothing to free. Steps without events compare this column and look no further.
    """

    def __init__(self, groups: tuple[KVGroup, ...], max_rows: int, max_blocks: int) -> None:
        self.groups = groups
        self.entries = [np.zeros((max_rows, max_blocks if group.grows else 0), np.int32) for group in groups]
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.num_cross_blocks = np.zeros(max_rows, np.int32)
        self.num_released = [np.zeros(max_rows, np.int32) for _ in groups]
        self.reserved_until = np.zeros(max_rows, np.int32)

    def num_used(self, row: int, group: KVGroup) -> int:
        """Entries in use in the row's table of `group`."""
        return int(self.num_blocks[row] if group.grows else self.num_cross_blocks[row])

    def of(self, row: int) -> tuple[np.ndarray, ...]:
        """Return a copy of the row's table per group, used entries only."""
        return tuple(
            entries[row, : self.num_used(row, group)].copy()
            for group, entries in zip(self.groups, self.entries, strict=True)
        )

    def num_common_blocks(self, group: KVGroup, rows: np.ndarray, ref_count: np.ndarray, most: int) -> int:
        """Leading blocks, `most` at most, that all of `rows` (two at least) hold in common.

        Those are exactly the blocks with one reference per row.
        """
        entries = self.entries[group.index]
        first = entries[rows[0], : min(self.num_used(int(rows[0]), group), most)]
        shared_by_all = (ref_count[first] == len(rows)) & (first != 0)
        if not len(first) or not shared_by_all[0]:
            return 0
        count = len(first) if shared_by_all.all() else int(np.argmin(shared_by_all))
        return int((entries[rows, :count] == first[:count]).all(axis=0).sum())
