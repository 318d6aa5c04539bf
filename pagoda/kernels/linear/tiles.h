// The tiles of every form of weights, by their height and width.
#pragma once

#include <utility>

#include "float_tiles.h"
#include "k_tiles.h"
#include "operand.h"

constexpr int MAX_TILE_ROWS = 6;
constexpr int MAX_TILE_PANELS = 4;

// Rows of x from `row` on, and elements [k, k_end) along K: a segment, or of quantised weights all. adds: to the sums of
// the segments before.
struct TileJob {
    const PackedLinear& w;
    const Operand& x;
    int64_t row, k, k_end;
    bool adds;
    const uint8_t* unpacked = nullptr;  // the codes of the panel, where `int_tiles` has UNPACKED
};

using Tile = void (*)(const TileJob& job, const char* panel, int64_t panel_stride, float* out, Prefetch prefetch);

template <class Step>
struct FloatTile {
    template <int ROWS, int PANELS>
    static void run(const TileJob& job, const char* panel, int64_t panel_stride, float* out, Prefetch prefetch) {
        using Weight = typename Step::Weight;
        const auto* x = static_cast<const typename Step::Word*>(job.x.words);
        float_tile<Step, ROWS, PANELS>(x + job.row * job.x.stride + words_of(job.w, job.k), job.x.stride,
                                       reinterpret_cast<const Weight*>(panel),
                                       panel_stride / static_cast<int64_t>(sizeof(Weight)),
                                       word_steps(job.w, job.k_end - job.k), out, job.adds, prefetch);
    }
};
template <int32_t KIND, int GROUP, bool UNPACKED>
struct IntTile {
    template <int ROWS, int PANELS>
    static void run(const TileJob& job, const char* panel, int64_t panel_stride, float* out, Prefetch prefetch) {
        constexpr int SIZE = x_group(WEIGHT_FORMS[KIND], GROUP), SUMS = sums_of_x_group(WEIGHT_FORMS[KIND], GROUP);
        int64_t groups = groups_of(job.w), count = (job.k_end - job.k + GROUP - 1) / GROUP;
        int64_t at = job.row * x_groups_of(job.w) + job.k / SIZE;
        const QuantizedRows& x = job.x.quantized;
        int_tile<KIND, GROUP, ROWS, PANELS, UNPACKED>({x.bytes + at * SIZE, x.scales + at, x.sums + at * SUMS}, groups,
                                                      count, reinterpret_cast<const uint8_t*>(panel), panel_stride,
                                                      job.unpacked, out, prefetch);
    }
};

// Tiles of every height, as wide (1, 2 or 4 panels) as the registers allow.
struct Tiles {
    Tile narrow[6], wide[6], widest[3];  // 1, 2, 4 panels, by rows - 1; null if they need too many registers
    // The widest tile for `rows` rows.
    int panels(int64_t rows) const {
        if (rows <= 3 && widest[rows - 1] != nullptr) return 4;
        return wide[rows - 1] != nullptr ? 2 : 1;
    }
    Tile of(int64_t rows, int panels) const {
        return panels == 4 ? widest[rows - 1] : panels == 2 ? wide[rows - 1] : narrow[rows - 1];
    }
};

// Of codes that take long to unpack, a core keeps too few reads under way: tiles of one panel prefetch the next.
constexpr bool reads_ahead(int32_t kind) { return WEIGHT_FORMS[kind].bits >= 4 && WEIGHT_FORMS[kind].bits <= 6; }

template <class Of, int PANELS, int COUNT, int... BELOW>
constexpr void set_tiles(Tile (&tiles)[COUNT], std::integer_sequence<int, BELOW...>) {
    ((tiles[BELOW] = Of::template run<BELOW + 1, PANELS>), ...);
}
// Those of two panels up to WIDE rows, of four up to WIDEST.
template <class Of, int WIDE, int WIDEST>
constexpr Tiles tiles_of() {
    Tiles tiles{};
    set_tiles<Of, 1>(tiles.narrow, std::make_integer_sequence<int, 6>());
    set_tiles<Of, 2>(tiles.wide, std::make_integer_sequence<int, WIDE>());
    set_tiles<Of, 4>(tiles.widest, std::make_integer_sequence<int, WIDEST>());
    return tiles;
}
template <class Step>
constexpr Tiles float_tiles() {
    return tiles_of<FloatTile<Step>, MANY_REGISTERS ? 6 : 0, MANY_REGISTERS ? 3 : 0>();
}
template <int32_t KIND, int GROUP, bool UNPACKED>
constexpr Tiles int_tiles() {
    constexpr bool WIDE = MANY_REGISTERS && !reads_ahead(KIND);
    return tiles_of<IntTile<KIND, GROUP, UNPACKED>, WIDE ? 3 : 0, WIDE ? 1 : 0>();
}

// How a weight is multiplied. unpack: how its panels are unpacked for UNPACK_ROWS rows, which `of_unpacked` multiply
// then; null for never.
struct Kernels {
    Tiles tiles, of_unpacked;
    void (*unpack)(const uint8_t* panel, int64_t groups, uint8_t* to);
};

inline const Kernels& kernels_of(const PackedLinear& w) {
    static const Kernels f32{float_tiles<StepF32>(), {}, nullptr}, bf16{float_tiles<StepBF16>(), {}, nullptr},
        f16{float_tiles<StepF16>(), {}, nullptr};
    switch (w.kind) {
        case KIND_F32: return f32;
        case KIND_BF16: return bf16;
        case KIND_F16: return f16;
        default: break;
    }
    const Kernels* found = nullptr;
    with_code_group(w, [&](auto at) {
        constexpr int32_t KIND = CODE_GROUPS[at].kind, GROUP = CODE_GROUPS[at].size;
        static const Kernels kernels = [] {
            if constexpr (WEIGHT_FORMS[KIND].sub_group != 0)
                return Kernels{int_tiles<KIND, GROUP, false>(), int_tiles<KIND, GROUP, true>(), unpack_panel<KIND>};
            else
                return Kernels{int_tiles<KIND, GROUP, false>(), {}, nullptr};
        }();
        found = &kernels;
    });
    return *found;
}
