// int8 codes as bf16, which holds integers up to 127 exactly: the upper half of the float.
#pragma once

#include "simd.h"

// 32 codes, two per lane.
inline u32x16 widen_32(const int8_t* from) {
    u32x16 pair = load_halfwords(from);
    f32x16 low = converted<f32x16>((i32x16)(pair << 24) >> 24);
    f32x16 high = converted<f32x16>((i32x16)(pair << 16) >> 24);
    return ((u32x16)low >> 16) | ((u32x16)high & 0xffff0000u);
}

#if defined(PAGODA_AVX512) && defined(__AVX512VBMI__)
// The bytes of the bf16 values of 0 .. 127; the sign comes from the code.
struct Bf16Bytes {
    alignas(64) uint8_t low[128], high[128];
    constexpr Bf16Bytes() : low(), high() {
        for (int i = 1; i < 128; i++) {
            int exponent = 0;
            while (i >> (exponent + 1)) exponent++;
            int bits = (exponent + 127) << 7 | ((i << 7 >> exponent) & 127);
            low[i] = bits & 255, high[i] = bits >> 8;
        }
    }
};
static constexpr Bf16Bytes BF16_BYTES;
#endif

// `count` codes, a multiple of 64, of -127 .. 127.
inline void widen_int8(const int8_t* from, int64_t count, uint32_t* to) {
#if defined(PAGODA_AVX512) && defined(__AVX512VBMI__)
    // Table lookup by byte: two lookups and one interleaving for 64 codes; widen_32 takes nine operations for 32.
    __m512i low_0 = _mm512_load_si512(BF16_BYTES.low), low_1 = _mm512_load_si512(BF16_BYTES.low + 64);
    __m512i high_0 = _mm512_load_si512(BF16_BYTES.high), high_1 = _mm512_load_si512(BF16_BYTES.high + 64);
    // Interleaving works within 16 bytes, so quarters 0..3 and 4..7 are first moved to where the result is in order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < count; i += 64) {
        __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i)), size = _mm512_abs_epi8(code);
        __m512i low = _mm512_permutex2var_epi8(low_0, size, low_1);
        __m512i high = _mm512_permutex2var_epi8(high_0, size, high_1);
        high = _mm512_or_si512(high, _mm512_and_si512(code, _mm512_set1_epi8(char(0x80))));
        _mm512_storeu_si512(to + i / 2, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(to + i / 2 + 16, _mm512_unpackhi_epi8(low, high));
    }
#else
    for (int64_t i = 0; i < count; i += 32) {
        u32x16 lanes = widen_32(from + i);
        store_lanes_of(to + i / 2, lanes);
    }
#endif
}
