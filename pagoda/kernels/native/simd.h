// Sixteen floats at a time, on any CPU, with the same order of operations everywhere.
//
// Intrinsics are used only where they pay. Fused multiply-adds are explicit: the build forbids contraction, so that two
// instances of one loop cannot round differently.
#pragma once

#include "abi.h"
#include "lanes.h"

// Storage types of BF16 and F16.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// Calls body with an element of a float dtype: [&](auto element) { using T = decltype(element); ... }.
template <class Body>
inline void by_dtype(int32_t dtype, Body&& body) {
    switch (dtype) {
        case F32: return body(float());
        case BF16: return body(bf16());
        default: return body(f16());
    }
}

// x in every lane. (0 + x would be an addition, since it is not x for -0.)
inline f32x16 splat(float x) { return x - f32x16{}; }
// 0, 1, ... 15.
inline i32x16 lane_numbers() {
    alignas(64) static const int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_as<i32x16>(NUMBERS);
}

#if defined(PAGODA_AVX512)
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline f32x16 vmax(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
inline i32x16 vmax(i32x16 a, i32x16 b) { return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b); }
// The nearest integers, ties to even, of values within +-2^22.
inline i32x16 to_nearest(f32x16 v) { return (i32x16)_mm512_cvtps_epi32((__m512)v); }
#else
#if defined(PAGODA_AVX2)
using F32Half = decltype(f32x16::low);
using I32Half = decltype(i32x16::low);
inline F32Half fma(F32Half a, F32Half b, F32Half c) { return (F32Half)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline F32Half vmax(F32Half a, F32Half b) { return (F32Half)_mm256_max_ps((__m256)a, (__m256)b); }
inline F32Half vmin(F32Half a, F32Half b) { return (F32Half)_mm256_min_ps((__m256)a, (__m256)b); }
inline I32Half vmax(I32Half a, I32Half b) { return (I32Half)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline I32Half to_nearest(F32Half v) { return (I32Half)_mm256_cvtps_epi32((__m256)v); }
#else
template <class V>
inline V fma(V a, V b, V c) {
    return a * b + c;
}
template <class V>
inline V vmax(V a, V b) {
    return select(a > b, a, b);
}
template <class V>
inline V vmin(V a, V b) {
    return select(a < b, a, b);
}
// Adding and subtracting 1.5 * 2^23 rounds away the fraction.
template <class V>
inline auto to_nearest(V v) {
    return converted<decltype(v == v)>((v + 12582912.0f) - 12582912.0f);
}
#endif
template <class Half>
inline Pair<Half> fma(Pair<Half> a, Pair<Half> b, Pair<Half> c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
// a > b ? a : b, so b if a lane is no number.
template <class Half>
inline Pair<Half> vmax(Pair<Half> a, Pair<Half> b) {
    return {vmax(a.low, b.low), vmax(a.high, b.high)};
}
template <class Half>
inline Pair<Half> vmin(Pair<Half> a, Pair<Half> b) {
    return {vmin(a.low, b.low), vmin(a.high, b.high)};
}
inline i32x16 to_nearest(f32x16 v) { return {to_nearest(v.low), to_nearest(v.high)}; }
#endif

// Sum and maximum over the lanes, always as the same tree.
inline float lane_sum(f32x16 v) {
#if defined(PAGODA_AVX2)
    __m256 eight = (__m256)(v.low + v.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float x[16];
    store_lanes_of(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}
inline float lane_max(f32x16 v) {
#if defined(PAGODA_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(PAGODA_AVX2)
    __m256 eight = (__m256)vmax(v.low, v.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float x[16];
    store_lanes_of(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

inline int32_t lane_sum(i32x16 v) {
#if defined(PAGODA_AVX512)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t x[16], sum = 0;
    store_lanes_of(x, v);
    for (int32_t lane : x) sum += lane;
    return sum;
#endif
}
// As integers, magnitudes keep their order and NaNs are above all others, so a maximum never loses a NaN.
inline i32x16 magnitude_bits(f32x16 v) { return (i32x16)v & 0x7fffffff; }
inline float largest_magnitude(i32x16 bits) {
#if defined(PAGODA_AVX512)
    int32_t largest = _mm512_reduce_max_epi32((__m512i)bits);
#else
    int32_t x[16], largest = 0;
    store_lanes_of(x, bits);
    for (int32_t lane : x) largest = lane > largest ? lane : largest;
#endif
    float value;
    memcpy(&value, &largest, 4);
    return value;
}

// The low bytes of integers within -128 .. 127.
inline void store(int8_t* p, i32x16 v) {
#if defined(PAGODA_AVX512)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(PAGODA_AVX2)
    // Packing works within 16 bytes, so the middle quarters are exchanged in between.
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    int32_t x[16];
    store_lanes_of(x, v);
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(x[i]);
#endif
}

// ---- loads and stores, widening to and rounding from float (ties to even) ----

inline f32x16 load(const float* p) { return load_as<f32x16>(p); }
// 16 words without conversion, from any address.
inline u32x16 load_words(const void* p) { return load_as<u32x16>(p); }
inline void store(float* p, f32x16 v) { store_lanes_of(p, v); }

// 16 unsigned halfwords as words.
inline u32x16 load_halfwords(const void* p) {
#if defined(PAGODA_AVX512)
    return (u32x16)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));  // GCC 12 converts in halves
#elif defined(PAGODA_AVX2)
    auto* halves = (const __m128i*)p;
    using Half = decltype(u32x16::low);
    return {(Half)_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)),
            (Half)_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
#else
    return converted<u32x16>(load_as<u16x16>(p));
#endif
}
// 16 unsigned bytes as words.
inline u32x16 load_bytes(const void* p) {
#if defined(PAGODA_AVX512)
    return (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(PAGODA_AVX2)
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    using Half = decltype(u32x16::low);
    return {(Half)_mm256_cvtepu8_epi32(bytes), (Half)_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
#else
    uint32_t words[16];
    for (int i = 0; i < 16; i++) words[i] = static_cast<const uint8_t*>(p)[i];
    return load_words(words);
#endif
}
// The low halves of words.
inline void store_halfwords(void* p, u32x16 v) {
#if defined(PAGODA_AVX2)
    __m256i packed = _mm256_packus_epi32((__m256i)(v.low & 0xffffu), (__m256i)(v.high & 0xffffu));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
#else
    store_lanes_of(p, converted<u16x16>(v));
#endif
}

// The upper halfwords of the result are v rounded to bf16; its lower ones mean nothing.
inline u32x16 rounded_to_bf16(f32x16 v) {
    u32x16 bits = (u32x16)v;
    return select(v == v, bits + 0x7fffu + ((bits >> 16) & 1u), u32x16{} + 0x7fc00000u);
}
inline f32x16 load(const bf16* p) { return (f32x16)(load_halfwords(p) << 16); }
inline void store(bf16* p, f32x16 v) {
#if defined(PAGODA_AVX512_BF16)
    store_lanes_of(p, (u16x16)_mm512_cvtneps_pbh((__m512)v));
#else
    store_halfwords(p, rounded_to_bf16(v) >> 16);
#endif
}

inline f32x16 load(const f16* p) {
#if defined(PAGODA_AVX512)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(PAGODA_AVX2)
    auto* halves = (const __m128i*)p;
    return {(F32Half)_mm256_cvtph_ps(_mm_loadu_si128(halves)), (F32Half)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
    _Float16 raw[16];
    float wide[16];
    memcpy(raw, p, 32);
    for (int i = 0; i < 16; i++) wide[i] = static_cast<float>(raw[i]);
    return load(wide);
#endif
}
inline void store(f16* p, f32x16 v) {
#if defined(PAGODA_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(PAGODA_AVX2)
    auto* halves = (__m128i*)p;
    _mm_storeu_si128(halves, _mm256_cvtps_ph((__m256)v.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph((__m256)v.high, _MM_FROUND_TO_NEAREST_INT));
#else
    float wide[16];
    _Float16 narrow[16];
    store(wide, v);
    for (int i = 0; i < 16; i++) narrow[i] = static_cast<_Float16>(wide[i]);
    memcpy(p, narrow, 32);
#endif
}

// v rounded to type T and back.
template <class T>
inline f32x16 rounded(f32x16 v) {
    if constexpr (sizeof(T) == 4) return v;
#if !defined(PAGODA_AVX512_BF16)
    if constexpr (std::is_same<T, bf16>::value) return (f32x16)(rounded_to_bf16(v) & 0xffff0000u);
#endif
    T narrow[16];
    store(narrow, v);
    return load(narrow);
}

// The first n < 16 lanes; the rest read as zero and are not written.
template <class T>
inline f32x16 load_first(const T* p, int n) {
    T whole[16] = {};
    memcpy(static_cast<void*>(whole), p, sizeof(T) * n);
    return load(whole);
}
// The first n lanes; the rest are `rest`.
inline f32x16 load_lanes_or(const float* p, int n, float rest) {
    if (n == 16) return load(p);
    float whole[16];
    store(whole, splat(rest));
    memcpy(whole, p, sizeof(float) * static_cast<size_t>(n));
    return load(whole);
}
template <class T>
inline void store_first(T* p, f32x16 v, int n) {
    T whole[16];
    store(whole, v);
    memcpy(static_cast<void*>(p), whole, sizeof(T) * n);
}

// Call body(i, n) for i = 0, 16, ... with n lanes each; n < 16 only at the end of `count`.
template <class Body>
inline void for_lanes(int64_t count, Body&& body) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) body(i, 16);
    if (i < count) body(i, static_cast<int>(count - i));
}
template <class T>
inline f32x16 load_lanes(const T* p, int n) {
    return n == 16 ? load(p) : load_first(p, n);
}
template <class T>
inline void store_lanes(T* p, f32x16 v, int n) {
    if (n == 16)
        store(p, v);
    else
        store_first(p, v, n);
}

template <class T>
inline void widen(const T* x, float* to, int64_t count) {
    for_lanes(count, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(x + i, n), n); });
}

// ---- pairs of bf16: a 32-bit lane holds two adjacent values, the first in the low half ----

#if defined(PAGODA_AVX512_BF16)
// acc + a.high * b.high + a.low * b.low, rounded after each.
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
#endif

// ---- functions ----

// 2^x to about 2e-7 relative; 2^0 is exactly 1, and far below the smallest float it is exactly 0.
inline f32x16 exp2(f32x16 x) {
#if defined(PAGODA_AVX512)
    f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = vmax(splat(-150.0f), vmin(splat(150.0f), x));  // of a NaN, both return their second operand
    f32x16 n = (x + 12582912.0f) - 12582912.0f;
#endif
    f32x16 f = x - n;
    // Taylor of 2^f on [-1/2, 1/2]; the seventh term is below 2^-24.
    f32x16 p = splat(1.540353039338161e-4f);
    p = fma(p, f, splat(1.333355814642844e-3f));
    p = fma(p, f, splat(9.618129107628477e-3f));
    p = fma(p, f, splat(5.550410866482158e-2f));
    p = fma(p, f, splat(2.402265069591007e-1f));
    p = fma(p, f, splat(6.931471805599453e-1f));
    p = fma(p, f, splat(1.0f));
#if defined(PAGODA_AVX512)
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    // The product of two normal floats reaches down to 2^-150, which rounds to 0.
    i32x16 whole = converted<i32x16>(n), half = whole >> 1;
    f32x16 first = (f32x16)((half + 127) << 23), second = (f32x16)((whole - half + 127) << 23);
    return p * first * second;
#endif
}
constexpr float LOG2_E = 1.4426950408889634f;
inline f32x16 exp(f32x16 x) { return exp2(x * LOG2_E); }
inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
// log(1 + exp(x)), to a few units in the last place of any result.
inline f32x16 softplus(f32x16 x) {
    f32x16 u = exp(select(x > 0.0f, -x, x));
    // log(1 + u) is 2 artanh(s), and s is at most 1/3: the ninth term of its series is below 2^-27 of the first.
    f32x16 s = u / (2.0f + u), z = s * s;
    f32x16 p = splat(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) p = fma(p, z, splat(1.0f / static_cast<float>(odd)));
    return vmax(f32x16{}, x) + 2.0f * s * p;
}
inline f32x16 tanh(f32x16 x) {
    // Near 0 the quotient cancels, and the odd series is more accurate.
    f32x16 e = exp(2.0f * select(x > 0.0f, -x, x));
    f32x16 far = (1.0f - e) / (1.0f + e);
    f32x16 s = x * x;
    f32x16 series = x * (1.0f + s * (-0.33333333f + s * (0.13333333f + s * -0.053968254f)));
    f32x16 size = select(x > 0.0f, x, -x);
    return select(size < 0.15f, series, select(x > 0.0f, far, -far));
}
