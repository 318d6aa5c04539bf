// Sixteen floats at a time, on any CPU, with the same order of operations everywhere.
//
// The vectors are the compiler's own (GCC and clang lower 64-byte vectors to what the CPU has); intrinsics are used
// only where they pay. Fused multiply-adds are explicit: the build forbids contraction, so that two
// instances of one loop cannot round differently.
#pragma once

#include <cstdint>
#include <cstring>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGODA_AVX512 1
#endif
#if defined(PAGODA_AVX512) && defined(__AVX512BF16__)
#define PAGODA_AVX512_BF16 1
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

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

inline f32x16 splat(float x) { return f32x16{} + x; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(PAGODA_AVX512)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    f32x16 out;
    for (int half = 0; half < 2; half++) {
        __m256 x, y, z;
        memcpy(&x, (const char*)&a + 32 * half, 32);
        memcpy(&y, (const char*)&b + 32 * half, 32);
        memcpy(&z, (const char*)&c + 32 * half, 32);
        z = _mm256_fmadd_ps(x, y, z);
        memcpy((char*)&out + 32 * half, &z, 32);
    }
    return out;
#else
    return a * b + c;
#endif
}

inline f32x16 vmax(f32x16 a, f32x16 b) {
#if defined(PAGODA_AVX512)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Sum and maximum over the lanes, always as the same tree.
inline float lane_sum(f32x16 v) {
    float x[16];
    memcpy(x, &v, 64);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
inline float lane_max(f32x16 v) {
#if defined(PAGODA_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[16];
    memcpy(x, &v, 64);
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
    memcpy(x, &v, 64);
    for (int32_t lane : x) sum += lane;
    return sum;
#endif
}
inline i32x16 vmax(i32x16 a, i32x16 b) {
#if defined(PAGODA_AVX512)
    return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return a > b ? a : b;
#endif
}
// As integers, magnitudes keep their order and NaNs are above all others, so a maximum never loses a NaN.
inline i32x16 magnitude_bits(f32x16 v) { return (i32x16)v & 0x7fffffff; }
inline float largest_magnitude(i32x16 bits) {
#if defined(PAGODA_AVX512)
    int32_t largest = _mm512_reduce_max_epi32((__m512i)bits);
#else
    int32_t largest = 0;
    for (int i = 0; i < 16; i++) largest = bits[i] > largest ? bits[i] : largest;
#endif
    float value;
    memcpy(&value, &largest, 4);
    return value;
}

// The nearest integers, ties to even, of values within +-2^22.
inline i32x16 to_nearest(f32x16 v) {
#if defined(PAGODA_AVX512)
    return (i32x16)_mm512_cvtps_epi32((__m512)v);
#else
    // Adding and subtracting 1.5 * 2^23 rounds away the fraction.
    return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, i32x16);
#endif
}
// The low bytes.
inline void store(int8_t* p, i32x16 v) {
#if defined(PAGODA_AVX512)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(v[i]);
#endif
}

// ---- loads and stores, widening to and rounding from float (ties to even) ----

inline f32x16 load(const float* p) {
    f32x16 v;
    memcpy(&v, p, 64);
    return v;
}
inline f32x16 load(const bf16* p) {
    u16x16 raw;
    memcpy(&raw, p, 32);
#if defined(PAGODA_AVX512)
    return (f32x16)((u32x16)_mm512_cvtepu16_epi32((__m256i)raw) << 16);  // GCC 12 widens in halves
#else
    return (f32x16)(__builtin_convertvector(raw, u32x16) << 16);
#endif
}
inline f32x16 load(const f16* p) {
#if defined(PAGODA_AVX512)
    __m256i raw;
    memcpy(&raw, p, 32);
    return (f32x16)_mm512_cvtph_ps(raw);
#else
    _Float16 raw[16];
    float wide[16];
    memcpy(raw, p, 32);
    for (int i = 0; i < 16; i++) wide[i] = static_cast<float>(raw[i]);
    return load(wide);
#endif
}
// 16 words without conversion, from any address.
inline u32x16 load_words(const void* p) {
    u32x16 v;
    memcpy(&v, p, 64);
    return v;
}
inline void store(float* p, f32x16 v) { memcpy(p, &v, 64); }
inline u16x16 to_bf16(f32x16 v) {
#if defined(PAGODA_AVX512_BF16)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector(v == v ? rounded : u32x16{} + 0x7fc0u, u16x16);
#endif
}
inline void store(bf16* p, f32x16 v) {
    u16x16 narrow = to_bf16(v);
    memcpy(p, &narrow, 32);
}
inline void store(f16* p, f32x16 v) {
#if defined(PAGODA_AVX512)
    __m256i narrow = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(p, &narrow, 32);
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

// ---- pairs of bf16: a 32-bit lane holds two adjacent values, the first in the low half ----

// acc + a.low * b.low + a.high * b.high.
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(PAGODA_AVX512_BF16)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma((f32x16)(a << 16), (f32x16)(b << 16), acc);
    return fma((f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u), acc);
#endif
}

// ---- functions ----

// 2^x to about 2e-7 relative; 2^0 is exactly 1, and far below the smallest float it is exactly 0.
inline f32x16 exp2(f32x16 x) {
#if defined(PAGODA_AVX512)
    f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    f32x16 low = splat(-150.0f), high = splat(150.0f);
    x = x < low ? low : (x > high ? high : x);
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
    i32x16 whole = __builtin_convertvector(n, i32x16), half = whole >> 1;
    f32x16 first = (f32x16)((half + 127) << 23), second = (f32x16)((whole - half + 127) << 23);
    return p * first * second;
#endif
}
constexpr float LOG2_E = 1.4426950408889634f;
inline f32x16 exp(f32x16 x) { return exp2(x * LOG2_E); }
inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
inline f32x16 tanh(f32x16 x) {
    // Near 0 the quotient cancels, and the odd series is more accurate.
    f32x16 e = exp(2.0f * (x > 0.0f ? -x : x));
    f32x16 far = (1.0f - e) / (1.0f + e);
    f32x16 s = x * x;
    f32x16 series = x * (1.0f + s * (-0.33333333f + s * (0.13333333f + s * -0.053968254f)));
    f32x16 size = x > 0.0f ? x : -x;
    return size < 0.15f ? series : (x > 0.0f ? far : -far);
}
