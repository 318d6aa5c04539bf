// Low-rank updates; their definition is low_rank/reference.py.
//
// Rows are sorted by adapter, so that each adapter multiplies all of its rows at once, with the linear layer's own
// tiles: first all of its `a`, then the `b` of each piece. Every rank has its own size: nothing is padded to the
// largest. A row's bits do not depend on its neighbours, because a tile sums each row in one order.
#include <algorithm>

#include "../linear/gemm.h"
#include "elementwise.h"

namespace {

constexpr int64_t BLOCK_ROWS = 48;   // rows that one piece of work covers
constexpr int64_t BLOCK_PANELS = 8;  // panels of `b` in one piece of work: its sums stay in the L1 cache

// The rows of one adapter: order[begin] .. order[end - 1].
struct Segment {
    const LowRankSlot* slot;
    int64_t begin, end;
    int64_t rows() const { return end - begin; }
    int64_t blocks() const { return (rows() + BLOCK_ROWS - 1) / BLOCK_ROWS; }
};

// order: rows of the batch, sorted by adapter; within one adapter they ascend.
struct Sorted {
    int32_t* order;
    Segment* segments;
    int64_t num_segments, num_rows;
    int64_t inner;  // the largest sum of ranks
};

// What each thread claims pieces of: `width` panels times BLOCK_ROWS rows of a product.
struct Task {
    const Segment* segment;
    const LowRankPiece* piece;
    int64_t panels, width, end;  // end: number of the piece of work after its last

    int64_t columns() const { return (panels + width - 1) / width; }
};

Sorted sort_rows(const Tensor& adapters, const LowRankSlots& table) {
    const int32_t* slot_of = elements_of<const int32_t>(adapters);
    int64_t rows = adapters.rows, count = table.count;
    size_t bytes = static_cast<size_t>(count) * (sizeof(Segment) + sizeof(int64_t)) + static_cast<size_t>(rows) * 4;
    auto* segments = static_cast<Segment*>(thread_scratch(bytes, 0));
    auto* next = reinterpret_cast<int64_t*>(segments + count);
    auto* order = reinterpret_cast<int32_t*>(next + count);
    std::fill(next, next + count, 0);
    for (int64_t i = 0; i < rows; i++) next[slot_of[i]]++;
    Sorted sorted{order, segments, 0, 0, 0};
    for (int64_t s = 0; s < count; s++) {
        const LowRankSlot& slot = table.slots[s];
        int64_t here = next[s];
        next[s] = slot.a == nullptr ? -1 : sorted.num_rows;
        if (here == 0 || slot.a == nullptr) continue;
        segments[sorted.num_segments++] = {&slot, sorted.num_rows, sorted.num_rows + here};
        sorted.num_rows += here;
        sorted.inner = std::max(sorted.inner, slot.a->out_features);
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t& place = next[slot_of[i]];
        if (place >= 0) order[place++] = static_cast<int32_t>(i);
    }
    return sorted;
}

// Run body(segment, piece, first row, end row, first panel, end panel) for every piece of work. Rows count in `order`.
template <class Body>
void for_work(const Task* tasks, int64_t count, int64_t elements, int threads, Body&& body) {
    for_claims(tasks[count - 1].end, threads_for(elements, threads), [&](int64_t work) {
        const Task* task = std::upper_bound(tasks, tasks + count, work, [](int64_t at, const Task& of) { return at < of.end; });
        int64_t within = work - (task == tasks ? 0 : task[-1].end), columns = task->columns();
        int64_t row = task->segment->begin + within / columns * BLOCK_ROWS, panel = within % columns * task->width;
        body(*task->segment, task->piece, row, std::min(task->segment->end, row + BLOCK_ROWS), panel,
             std::min(task->panels, panel + task->width));
    });
}

void multiply(LinearJob job, int64_t panel, int64_t panel_end) {
    size_t bytes = linear_scratch_bytes(job);
    if (bytes > 0) {
        job.scratch = thread_scratch(bytes, 2);
        linear_convert(job, 0, linear_pieces_of_x(job));
    }
    linear_multiply_part(job, 0, job.rows, panel, panel_end);
}

int64_t panels_of(const PackedLinear& w) { return (w.out_features + PANEL - 1) / PANEL; }

// inner [num_rows][sorted.inner] = a @ x, of the sorted rows.
template <class T>
void shrink(const Tensor& x, const Sorted& sorted, Task* tasks, T* inner, int threads) {
    int64_t work = 0, elements = 0;
    for (int64_t s = 0; s < sorted.num_segments; s++) {
        const Segment& segment = sorted.segments[s];
        const PackedLinear& a = *segment.slot->a;
        int64_t panels = panels_of(a);
        // With few rows, threads divide the weights; with many, each piece of work reads its rows once.
        tasks[s] = {&segment, nullptr, panels, segment.blocks() > 1 ? panels : 1, 0};
        work = tasks[s].end = work + segment.blocks() * tasks[s].columns();
        elements += a.in_features * (a.out_features + segment.rows());
    }
    for_work(tasks, sorted.num_segments, elements, threads,
             [&](const Segment& segment, const LowRankPiece*, int64_t row, int64_t row_end, int64_t panel,
                 int64_t panel_end) {
                 const int32_t* order = sorted.order + row;
                 int64_t rows = row_end - row, stride = x.stride;
                 const T* from = elements_of<const T>(x) + order[0] * x.stride;
                 if (order[rows - 1] - order[0] != rows - 1) {  // not adjacent: copy them together
                     auto* copied = static_cast<T*>(thread_scratch(sizeof(T) * rows * x.dim, 1));
                     for (int64_t r = 0; r < rows; r++)
                         memcpy(static_cast<void*>(copied + r * x.dim), elements_of<const T>(x) + order[r] * x.stride,
                                sizeof(T) * x.dim);
                     from = copied;
                     stride = x.dim;
                 }
                 multiply({segment.slot->a, from, rows, stride, x.dtype, x.dtype, inner + row * sorted.inner,
                           sorted.inner},
                          panel, panel_end);
             });
}

// Column `column` of a packed weight of floats, its `out_features` elements.
template <class T>
void copy_column(const PackedLinear& w, int64_t column, T* to) {
    int64_t bytes = panel_bytes(w);
    for (int64_t i = 0; i < w.out_features; i++) {
        const char* panel = static_cast<const char*>(w.panels) + i / PANEL * bytes;
        int64_t pairs = w.kind == KIND_BF16 ? 2 : 1;
        int64_t at = (column / pairs * PANEL + i % PANEL) * pairs + column % pairs;
        memcpy(static_cast<void*>(to + i), panel + at * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
}

// The same for rows whose x is one-hot: inner is a column of `a`. Zeros for an id beyond its columns.
template <class T>
void pick(const Tensor& token_ids, const Sorted& sorted, T* inner) {
    const int32_t* ids = elements_of<const int32_t>(token_ids);
    for (int64_t s = 0; s < sorted.num_segments; s++) {
        const Segment& segment = sorted.segments[s];
        const PackedLinear& a = *segment.slot->a;
        for (int64_t row = segment.begin; row < segment.end; row++) {
            int32_t id = ids[sorted.order[row]];
            T* to = inner + row * sorted.inner;
            if (id >= 0 && id < a.in_features)
                copy_column(a, id, to);
            else
                memset(static_cast<void*>(to), 0, sizeof(T) * a.out_features);
        }
    }
}

// y += b @ inner + bias, of the sorted rows.
template <class T, class Y>
void expand(const Tensor& y, const Sorted& sorted, Task* tasks, const T* inner, int32_t dtype, int threads) {
    int64_t count = 0, work = 0, elements = 0;
    for (int64_t s = 0; s < sorted.num_segments; s++) {
        const Segment& segment = sorted.segments[s];
        for (int64_t p = 0; p < segment.slot->count; p++) {
            const LowRankPiece& piece = segment.slot->pieces[p];
            tasks[count] = {&segment, &piece, panels_of(*piece.b), BLOCK_PANELS, 0};
            work = tasks[count].end = work + segment.blocks() * tasks[count].columns();
            elements += piece.b->out_features * (piece.b->in_features + segment.rows());
            count++;
        }
    }
    for_work(tasks, count, elements, threads,
             [&](const Segment&, const LowRankPiece* piece, int64_t row, int64_t row_end, int64_t panel,
                 int64_t panel_end) {
                 PackedLinear part = *piece->b;
                 part.panels = static_cast<const char*>(part.panels) + panel * panel_bytes(part);
                 if (part.bias != nullptr) part.bias += panel * PANEL;
                 part.out_features = std::min(part.out_features, panel_end * PANEL) - panel * PANEL;
                 int64_t rows = row_end - row, columns = part.out_features;
                 auto* sums = static_cast<float*>(thread_scratch(sizeof(float) * rows * columns, 1));
                 multiply({&part, inner + row * sorted.inner + piece->first_rank, rows, sorted.inner, dtype, F32, sums,
                           columns},
                          0, panel_end - panel);
                 for (int64_t r = 0; r < rows; r++) {
                     Y* to = elements_of<Y>(y) + sorted.order[row + r] * y.stride + piece->first_row + panel * PANEL;
                     for_lanes(columns, [&](int64_t i, int n) {
                         store_lanes(to + i, load_lanes(to + i, n) + load_lanes(sums + r * columns + i, n), n);
                     });
                 }
             });
}

// fill(sorted, tasks, inner) computes `inner` in the dtype of the weights.
template <class Fill>
void run(const Tensor& y, const Tensor& adapters, const LowRankSlots& table, int threads, Fill&& fill) {
    Sorted sorted = sort_rows(adapters, table);
    if (sorted.num_rows == 0) return;
    int64_t most = 0;
    for (int64_t s = 0; s < sorted.num_segments; s++) most += std::max<int64_t>(1, sorted.segments[s].slot->count);
    by_dtype(table.dtype, [&](auto element) {
        using T = decltype(element);
        sorted.inner += sorted.inner % 2;
        size_t task_bytes = static_cast<size_t>(round_up(most * static_cast<int64_t>(sizeof(Task)), 64));
        auto* memory = static_cast<char*>(thread_scratch(task_bytes + sizeof(T) * sorted.num_rows * sorted.inner, 3));
        auto* tasks = reinterpret_cast<Task*>(memory);
        auto* inner = reinterpret_cast<T*>(memory + task_bytes);
        fill(sorted, tasks, inner);
        by_dtype(y.dtype, [&](auto out) {
            expand<T, decltype(out)>(y, sorted, tasks, inner, table.dtype, threads);
        });
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_add_low_rank(const AddLowRankArgs* a, int32_t threads) {
    run(a->y, a->adapters, *a->table, threads,
        [&](const Sorted& sorted, Task* tasks, auto* inner) { shrink(a->x, sorted, tasks, inner, threads); });
}

PAGODA_EXPORT void pagoda_add_low_rank_embedding(const AddLowRankEmbeddingArgs* a, int32_t threads) {
    run(a->y, a->adapters, *a->table, threads,
        [&](const Sorted& sorted, Task*, auto* inner) { pick(a->token_ids, sorted, inner); });
}
