// The layout of one head's K and V within a block, which attention multiplies without rearranging.
//
//   bf16, int8   K [D / 2][slot][2]    pairs of adjacent dimensions; the slots of a pair are adjacent
//                V [slot / 2][D][2]    pairs of adjacent slots
//   fp32, fp16   K [D][slot]           V [slot][D]
//
// Scores of 16 slots are then computed at once, without a sum across lanes, and in bf16 both products are of pairs,
// the CPU's own dot product. Tensors keep the shape [blocks, K, block_size, D]: the layout stays inside the kernels.
#pragma once

#include <cstdint>
#include <cstring>

template <class Stored>
struct PageLayout {
    static constexpr int PAIR = sizeof(Stored) == 4 ? 1 : 2;
};
struct f16;
template <>
struct PageLayout<f16> {
    static constexpr int PAIR = 1;
};

// Element index of dimension d of slot `slot`.
template <class Stored>
inline int64_t k_offset(int64_t d, int64_t slot, int64_t block_size) {
    constexpr int P = PageLayout<Stored>::PAIR;
    return (d / P * block_size + slot) * P + d % P;
}
template <class Stored>
inline int64_t v_offset(int64_t d, int64_t slot, int64_t head_dim) {
    constexpr int P = PageLayout<Stored>::PAIR;
    return (slot / P * head_dim + d) * P + slot % P;
}

// Write one head of one token to its slot of a page.
template <class Stored>
void scatter_k(const Stored* row, Stored* page, int64_t slot, int64_t block_size, int64_t head_dim) {
    constexpr int P = PageLayout<Stored>::PAIR;
    Stored* to = page + slot * P;
    for (int64_t d = 0; d < head_dim; d += P, to += block_size * P)
        memcpy(static_cast<void*>(to), row + d, sizeof(Stored) * P);
}
template <class Stored>
void scatter_v(const Stored* row, Stored* page, int64_t slot, int64_t head_dim) {
    constexpr int P = PageLayout<Stored>::PAIR;
    Stored* to = page + v_offset<Stored>(0, slot, head_dim);
    for (int64_t d = 0; d < head_dim; d++) to[d * P] = row[d];
}
