// A rectangle of a linear layer's output: tiles, and the epilogue of each.
#pragma once

#include "epilogue.h"
#include "tiles.h"

constexpr int SUMS_SCRATCH = 4, CODES_SCRATCH = 5;
// With at least this many rows, the codes of a panel with integer scales are unpacked to bytes once for all tiles.
constexpr int64_t UNPACK_ROWS = WITHOUT_VNNI ? 16 : 32;

// Rows [row, row_end) of panels [panel, panel_end), with a gate of their partners too.
struct Rectangle {
    int64_t row, row_end, panel, panel_end;
    int64_t height() const { return row_end - row; }
};

// Multiplies a rectangle on the calling thread. next_panel: the one that this thread will probably multiply next, or -1.
class Product {
  public:
    Product(const LinearJob& job, const Rectangle& of, int64_t next_panel)
        : job(job), w(*job.weight), kernels(kernels_of(w)), x(operand(job)), of(of), next_panel(next_panel) {
        if (unpacks) {
            codes = groups_of(w) * w.group * PANEL;
            unpacked = static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(codes * sides), CODES_SCRATCH));
        }
        if (in_segments) {
            int64_t kept = of.height() * (of.panel_end - of.panel) * sides * PANEL;
            all_sums = static_cast<float*>(thread_scratch(sizeof(float) * static_cast<size_t>(kept), SUMS_SCRATCH));
        }
    }
    void run() {
        for (int64_t k = 0, k_end; k < w.in_features; k = k_end) {
            k_end = std::min(w.in_features, k + elements_at_once(w));
            for (int64_t at = of.panel, width = most_panels; at < of.panel_end; at += width) {
                while (width > of.panel_end - at) width /= 2;
                multiply_panels({at, width, k, k_end});
            }
        }
    }

  private:
    // `width` panels from `panel` on, and elements [k, k_end) of them.
    struct Part {
        int64_t panel, width, k, k_end;
    };

    const LinearJob& job;
    const PackedLinear& w;
    const Kernels& kernels;
    const Operand x;
    const Rectangle of;
    const int64_t next_panel;
    const bool gated = job.gated, in_segments = elements_at_once(w) < w.in_features;
    const bool unpacks = kernels.unpack != nullptr && of.height() >= UNPACK_ROWS;
    const Tiles& tiles = unpacks ? kernels.of_unpacked : kernels.tiles;
    const int64_t sides = gated ? 2 : 1, bytes = panel_bytes(w), partner = w.out_features / 2 / PANEL * bytes;
    const int64_t count = (of.height() + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;  // tiles along the rows, of nearly equal height
    const int64_t most_rows = (of.height() + count - 1) / count;
    const int most_panels = gated ? 1 : tiles.panels(most_rows);
    // A gate and its partner are two calls of narrow tiles, or one of a wide one.
    const int64_t calls = gated && tiles.panels(most_rows) == 1 ? 2 * count : count;
    int64_t codes = 0;            // bytes of an unpacked panel
    uint8_t* unpacked = nullptr;  // a panel, and its partner
    float* all_sums = nullptr;    // of all tiles, where there are several segments
    alignas(64) float of_tile[MAX_TILE_ROWS * MAX_TILE_PANELS * PANEL];  // or of one

    const char* weights(int64_t panel, int64_t k) const {
        return static_cast<const char*>(w.panels) + panel * bytes + panel_bytes(w, k);
    }

    // What the first call prefetches of the part after `part`; the next calls continue. Together, they prefetch once
    // everything that is read next, and each step as much as any other: the weights arrive while the tiles compute.
    Prefetch prefetch_after(const Part& part, int64_t steps) const {
        bool ends_segment = part.panel + part.width >= of.panel_end, ends = ends_segment && part.k_end == w.in_features;
        int64_t next = ends ? next_panel : ends_segment ? of.panel : part.panel + part.width;
        // With AVX-512, a single tile already reads other weights at the speed of memory: nothing to gain.
        if (next < 0 || (count == 1 && MANY_REGISTERS && !reads_ahead(w.kind))) return {weights(part.panel, part.k), 0, 0};
        int64_t k = ends ? 0 : ends_segment ? part.k_end : part.k;
        int64_t elements = std::min(w.in_features - k, elements_at_once(w));
        int64_t each = (in_segments ? 1 : part.width) * panel_bytes(w, elements) / (calls * steps) + 1;
        int64_t second = gated ? partner : in_segments && part.width > 1 ? bytes : each > 64 ? 64 : 0;
        return {weights(next, k), each, second};
    }

    void multiply_panels(const Part& part) {
        const char* first = weights(part.panel, part.k);
        int64_t steps = tile_steps(w, most_rows, part.k_end - part.k);
        Prefetch ahead = prefetch_after(part, steps);
        for (int64_t side = 0; unpacks && side < sides; side++)
            kernels.unpack(reinterpret_cast<const uint8_t*>(first + side * partner), groups_of(w), unpacked + side * codes);
        for (int64_t i = 0; i < count; i++) {
            int64_t row = of.row + of.height() * i / count, rows = of.row + of.height() * (i + 1) / count - row;
            float* sums = of_tile;
            if (in_segments)
                sums = all_sums + ((part.panel - of.panel) * of.height() + (row - of.row) * part.width) * sides * PANEL;
            bool apart = gated && tiles.panels(rows) == 1;  // the gate and its partner
            int64_t stride = (apart ? 1 : part.width * sides) * PANEL;
            float* up = sums + (apart ? rows : 1) * PANEL;
            Tile tile = tiles.of(rows, static_cast<int>(stride / PANEL));
            auto run_tile = [&](const char* from, const uint8_t* codes_of, int64_t apart_by, float* to, int64_t call) {
                Prefetch prefetch{ahead.at + call * steps * ahead.step, ahead.step, ahead.second};
                tile({w, x, row, part.k, part.k_end, part.k > 0, codes_of}, from, apart_by, to, prefetch);
            };
            if (!apart) {
                run_tile(first, unpacked, gated ? partner : bytes, sums, i);
            } else {
                run_tile(first, unpacked, 0, sums, 2 * i);
                run_tile(first + partner, unpacked + codes, 0, up, 2 * i + 1);
            }
            if (part.k_end == w.in_features) finish_tile({sums, up, stride, row, rows, part.panel * PANEL, part.width * PANEL});
        }
    }
    void finish_tile(Summed summed) const {
        summed.columns = std::min(w.out_features - summed.column, summed.columns);
        by_dtype(job.out_dtype, [&](auto element) { finish<decltype(element)>(job, summed); });
    }
};
