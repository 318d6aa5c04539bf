"""KVSwap: parks the KV of whole requests in host memory and brings it back."""

import numpy as np

from pagoda.core.block_pool import BlockPool
from pagoda.core.kv_cache_manager import KVCacheManager
from pagoda.core.kv_groups import blocks_for
from pagoda.core.request_table import Branch


class KVSwap:
    """Moves block references between the device pool and a host pool, and notes the copies that workers have to make.

    Host block ids run from 0. A block that several branches share is moved once, and is shared again on return.
    """

    def __init__(self, kv: KVCacheManager, num_host_blocks: int) -> None:
        self.kv = kv
        self.pool = BlockPool(num_host_blocks, first_id=0)

    def _used(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per KV group: (table indices, device blocks) that hold computed tokens of the row."""
        table = self.kv.table
        used = []
        for group, entries in zip(self.kv.groups, table.block_table, strict=True):
            computed = blocks_for(int(table.num_computed[row]), self.kv.block_size)
            count = computed if group.grows else int(table.num_cross_blocks[row])
            index = np.flatnonzero(entries[row, :count]).astype(np.int32)
            used.append((index, entries[row, index]))
        return used

    def has_room_for(self, rows: list[int]) -> bool:
        """Whether the host pool can take all blocks of these rows."""
        blocks = [blocks for row in rows for _, blocks in self._used(row)]
        return len(np.unique(np.concatenate(blocks))) <= self.pool.num_free

    def swap_out(self, branches: list[Branch]) -> None:
        """Move the KV of sibling branches to the host. Their rows lose all device blocks; the caller takes the rows."""
        kv = self.kv
        rows = [branch.row for branch in branches]
        used = [self._used(row) for row in rows]
        device = np.concatenate([blocks for row_used in used for _, blocks in row_used])
        unique, first, inverse, counts = np.unique(device, return_index=True, return_inverse=True, return_counts=True)
        host, _ = self.pool.take(len(unique))
        host[np.argsort(first)] = np.sort(host)  # table order
        self.pool.ref_count[host] = counts
        # A copy-on-write of this very step has not happened when swap-outs are made: its source still has the content.
        copied_from = kv.moves.source_of(set(rows))
        sources = np.array([copied_from.get(block, block) for block in unique.tolist()], np.int32)
        order = np.argsort(first)
        kv.moves.swap_out(np.stack((sources[order], host[order]), axis=1))
        host_of = host[inverse]
        at = 0
        for branch, row_used in zip(branches, used, strict=True):
            parts = []
            for index, blocks in row_used:
                parts.append((index, host_of[at : at + len(blocks)]))
                at += len(blocks)
            branch.host_blocks = tuple(parts)
            kv.release(branch.row)

    def blocks_to_return(self, branches: list[Branch], ends: list[int]) -> int:
        """Free device blocks it takes to bring `branches` back, with their tokens up to `ends` and the lookahead."""
        kv = self.kv
        host = np.concatenate([blocks for branch in branches for _, blocks in branch.host_blocks])
        need = len(np.unique(host))
        for branch, end in zip(branches, ends, strict=True):
            target = min(end + kv.num_lookahead_slots, kv.max_model_len)
            grown = blocks_for(target, kv.block_size) - blocks_for(branch.num_computed, kv.block_size)
            need += max(grown, 0) * len(kv.growing)
            need += len(kv.growing) if self._tail_is_shared(branch) else 0
        return need

    def _tail_is_shared(self, branch: Branch) -> bool:
        if branch.num_computed % self.kv.block_size == 0:
            return False
        tails = [branch.host_blocks[group.index][1][-1:] for group in self.kv.growing]
        return any((self.pool.ref_count[tail] > 1).any() for tail in tails)

    def swap_in(self, branches: list[Branch]) -> None:
        """Bring sibling branches back into rows that are empty. The caller checked `blocks_to_return`."""
        kv, table = self.kv, self.kv.table
        shared = [self._tail_is_shared(branch) for branch in branches]
        host = np.concatenate([blocks for branch in branches for _, blocks in branch.host_blocks])
        unique, first, inverse, counts = np.unique(host, return_index=True, return_inverse=True, return_counts=True)
        device = kv.take_for_return(counts)
        order = np.argsort(first)
        kv.moves.swap_in(np.stack((unique[order], device[order]), axis=1))
        device_of = device[inverse]
        at = 0
        for branch, tail_is_shared in zip(branches, shared, strict=True):
            row = branch.row
            for group, (index, blocks) in zip(kv.groups, branch.host_blocks, strict=True):
                table.block_table[group.index][row, index] = device_of[at : at + len(blocks)]
                if not group.grows:
                    table.num_cross_blocks[row] = len(index)
                elif len(index):
                    table.num_released[group.index][row] = index[0]
                    table.block_table[group.index][row, : index[0]] = 0  # an earlier owner of the row may stand there
                at += len(blocks)
            last = max(
                (int(index[-1]) + 1 for index, _ in branch.host_blocks[: len(kv.growing)] if len(index)), default=0
            )
            table.num_blocks[row] = last
            kv.resume_row(row, tail_is_shared)
            self.drop(branch)
        for branch in branches:
            kv.content.register(branch.row, branch.num_computed)

    def drop(self, branch: Branch) -> None:
        """Free the branch's host blocks."""
        for _, blocks in branch.host_blocks:
            self.pool.release(blocks[::-1])
        branch.host_blocks = ()
