// Checks of values that types cannot guarantee: ids, positions, slots, block tables. A wrong one would read or write
// other memory.
#include <algorithm>

#include "abi.h"

namespace {

// Index of the first of `count` values outside [0, limit), or -1. Compared as unsigned, so negative values are large. The
// maximum is computed first, because the compiler vectorises that.
template <class Index, class Unsigned>
int64_t first_outside(const void* indices, int64_t count, int64_t limit) {
    auto* at = static_cast<const Index*>(indices);
    auto below = static_cast<Unsigned>(limit);
    Unsigned largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<Unsigned>(at[i]));
    if (largest < below || count <= 0) return -1;
    for (int64_t i = 0;; i++)
        if (static_cast<Unsigned>(at[i]) >= below) return i;
}

}  // namespace

// indices: I32 or I64 [count].
PAGODA_EXPORT int32_t pagoda_check_indices(const void* indices, int32_t dtype, int64_t count, int64_t limit,
                                           int64_t* bad_at) {
    *bad_at = dtype == I64 ? first_outside<int64_t, uint64_t>(indices, count, limit)
                           : first_outside<int32_t, uint32_t>(indices, count, limit);
    return *bad_at < 0 ? BAD_NOTHING : BAD_INDEX;
}

// num_queries: rows of queries that the group describes, or -1 if only its slots are used. num_written: slots to check.
// num_blocks: of the cache, or NO_CACHE; then every row's tokens must be its queries, and nothing else is checked.
// bad_at: the row, or the slot, that is wrong.
PAGODA_EXPORT int32_t pagoda_check_group(const RowGroup* group, int64_t num_blocks, int64_t num_queries,
                                         int64_t num_written, int64_t* bad_at) {
    const RowGroup& g = *group;
    *bad_at = 0;
    if (num_queries >= 0 && g.query_start[0] != 0) return BAD_QUERY_START;
    for (int64_t row = 0; num_queries >= 0 && row < g.num_rows; row++) {
        *bad_at = row;
        int64_t queries = int64_t(g.query_start[row + 1]) - g.query_start[row], length = g.seq_lens[row];
        if (queries < 0 || g.query_start[row + 1] > num_queries) return BAD_QUERY_START;
        if (num_blocks == NO_CACHE) {
            if (length != queries) return BAD_SEQ_LEN;
            continue;
        }
        int64_t blocks = (length + g.block_size - 1) / g.block_size;
        if (length < queries || length < 0 || blocks > g.table_width) return BAD_SEQ_LEN;
        const int32_t* table = g.block_table + row * g.table_stride;
        if (first_outside<int32_t, uint32_t>(table, blocks, num_blocks) >= 0) return BAD_BLOCK_ID;
        for (int64_t i = 0; g.last_seen != nullptr && i < queries; i++) {
            int64_t token = g.query_start[row] + i, last = g.last_seen[token];
            if (last < length - queries + i || last >= length || (i && last < g.last_seen[token - 1])) return BAD_LAST_SEEN;
        }
    }
    *bad_at = g.num_rows;
    if (num_queries >= 0 && g.query_start[g.num_rows] != num_queries) return BAD_QUERY_START;
    if (num_blocks == NO_CACHE) return BAD_NOTHING;
    if (num_written > g.num_slots) return BAD_SLOT;
    *bad_at = first_outside<int64_t, uint64_t>(g.slot_mapping, num_written, num_blocks * g.block_size);
    return *bad_at < 0 ? BAD_NOTHING : BAD_SLOT;
}
