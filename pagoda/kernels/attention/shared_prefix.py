"""Find the prefix that the first rows of a batch share, from their block tables, on the host."""

import numpy as np

LEAST_SAVED_TOKENS = 16_384
"""Positions whose K and V are not read again, from which it pays to attend to a shared prefix once.

A position of a layer has 4 KiB of K and V (8 heads of 128 in 16 bits): 16,384 of them are 64 MiB, 20 us at 3.3 TB/s,
and a third of that from the second-level cache, which holds a prefix that many rows read in turn. The further launch,
and the tiles that are not full, take about 5 us.
"""


def find_shared_prefix(table: np.ndarray, context: np.ndarray, block_size: int) -> tuple[int, int] | None:
    """Return (tokens, rows) of `AttentionMetadata.shared_prefix`; None if attending to it once would save too little.

    table: int32 [num_rows, num_blocks].   context: int [num_rows], tokens in the cache before this step.
    Of the leading groups of rows, it is the one that saves most: its tokens times its rows but one.
    """
    num_rows, width = len(table), min(int(context[0]) // block_size, table.shape[1])
    if (num_rows - 1) * width * block_size < LEAST_SAVED_TOKENS:
        return None
    own = table[0, :width]
    same = (table[:, :width] == own) & (own != 0)  # blocks that a window has passed are the null block in all rows
    common = np.where(same.all(axis=1), width, same.argmin(axis=1))
    shared = np.minimum.accumulate(np.minimum(common, context // block_size)) * block_size
    saved = shared * np.arange(num_rows)
    most = int(saved.argmax())
    return (int(shared[most]), most + 1) if saved[most] >= LEAST_SAVED_TOKENS else None
