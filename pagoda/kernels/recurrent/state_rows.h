// The rows of a batch, and the blocks that hold their states.
#pragma once

#include <algorithm>

#include "abi.h"

// One row's new tokens. first: of them, in the batch.   start: the row's tokens before them.
struct StateRow {
    int64_t first, num_new, start, block_size;
    const int32_t* blocks;

    StateRow(const RowGroup& group, int64_t row)
        : first(group.query_start[row]),
          num_new(group.query_start[row + 1] - first),
          start(group.seq_lens[row] - num_new),
          block_size(group.block_size),
          blocks(group.block_table + row * group.table_stride) {}

    // The block of the state that the row goes on from; the null block is read as zeros.
    int32_t before() const { return start == 0 ? 0 : blocks[(start - 1) / block_size]; }
    // The blocks that the new tokens are in, first to last, by their place in the table.
    int64_t first_block() const { return start / block_size; }
    int64_t last_block() const { return (start + num_new - 1) / block_size; }
    // New tokens computed when the state of a block is left.
    int64_t done_at(int64_t block) const { return std::min((block + 1) * block_size - start, num_new); }
};
