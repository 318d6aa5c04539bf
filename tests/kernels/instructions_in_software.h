// AVX-512 and AVX-VNNI on a CPU without them: the instructions that the kernels use, lane by lane, as Intel's manual
// defines them.
//
// Included before a source that is compiled for AVX2, it makes the source take the branches of AVX-VNNI with
// SOFTWARE_AVX_VNNI, else those of AVX-512 with what SOFTWARE_VNNI, SOFTWARE_VBMI and SOFTWARE_BF16 add. An instruction
// that is missing here does not compile.
#pragma once

#include <immintrin.h>  // first: it reads the macros that are defined at the end

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

// Inlined and unrolled, these loops would keep the compiler busy for minutes.
#define OUT_OF_LINE __attribute__((noinline)) inline

namespace software {

template <class T, class Vector>
std::array<T, sizeof(Vector) / sizeof(T)> lanes(Vector v) {
    std::array<T, sizeof(Vector) / sizeof(T)> of;
    memcpy(of.data(), &v, sizeof(v));
    return of;
}
// The vector whose i-th lane, of type T, is f(i).
template <class T, class Vector, class F>
Vector vector_of(F f) {
    std::array<T, sizeof(Vector) / sizeof(T)> of;
    for (int i = 0; i < int(of.size()); i++) of[i] = static_cast<T>(f(i));
    Vector v;
    memcpy(&v, of.data(), sizeof(v));
    return v;
}
template <class Vector>
Vector loaded(const void* from) {
    Vector v;
    memcpy(&v, from, sizeof(v));
    return v;
}
inline float of_bits(uint32_t bits) { return loaded<float>(&bits); }
inline uint32_t bits_of(float x) { return loaded<uint32_t>(&x); }

// ---- memory ----
OUT_OF_LINE __m512i load_si512(const void* p) { return loaded<__m512i>(__builtin_assume_aligned(p, 64)); }
OUT_OF_LINE __m512i loadu_si512(const void* p) { return loaded<__m512i>(p); }
OUT_OF_LINE __m512d loadu_pd(const void* p) { return loaded<__m512d>(p); }
OUT_OF_LINE void storeu_si512(void* p, __m512i v) { memcpy(p, &v, sizeof(v)); }
OUT_OF_LINE __m256 mask_loadu_ps(__m256 rest, __mmask8 mask, const float* p) {
    auto other = lanes<float>(rest);
    return vector_of<float, __m256>([&](int i) { return mask >> i & 1 ? p[i] : other[i]; });
}

// ---- floats ----
OUT_OF_LINE __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    auto x = lanes<float>(a), y = lanes<float>(b), z = lanes<float>(c);
    return vector_of<float, __m512>([&](int i) { return std::fma(x[i], y[i], z[i]); });
}
OUT_OF_LINE __m512d fmadd_pd(__m512d a, __m512d b, __m512d c) {
    auto x = lanes<double>(a), y = lanes<double>(b), z = lanes<double>(c);
    return vector_of<double, __m512d>([&](int i) { return std::fma(x[i], y[i], z[i]); });
}
OUT_OF_LINE __m512 max_ps(__m512 a, __m512 b) {
    auto x = lanes<float>(a), y = lanes<float>(b);
    return vector_of<float, __m512>([&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
}
OUT_OF_LINE float reduce_max_ps(__m512 a) {
    auto x = lanes<float>(a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}
// To the nearest integer, ties to even.
OUT_OF_LINE __m512 roundscale_ps(__m512 a, int mode) {
    if (mode != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
    auto x = lanes<float>(a);
    return vector_of<float, __m512>([&](int i) { return std::nearbyint(x[i]); });
}
// a * 2^floor(b), rounded once. An infinite power gives 0 or infinity even of a quiet NaN.
OUT_OF_LINE __m512 scalef_ps(__m512 a, __m512 b) {
    auto x = lanes<float>(a), power = lanes<float>(b);
    return vector_of<float, __m512>([&](int i) {
        if (std::isnan(power[i])) return std::isnan(x[i]) ? x[i] : power[i];
        if (std::isinf(power[i]) && std::isnan(x[i])) return power[i] > 0 ? power[i] : 0.0f;
        if (std::isinf(power[i])) return power[i] > 0 ? x[i] * power[i] : x[i] / power[i];
        return std::ldexp(x[i], static_cast<int>(std::floor(std::clamp(power[i], -1000.0f, 1000.0f))));
    });
}
OUT_OF_LINE __m512i cvtps_epi32(__m512 a) {
    auto x = lanes<float>(a);
    return vector_of<int32_t, __m512i>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(x[i])); });
}
OUT_OF_LINE __m512d cvtps_pd(__m256 a) {
    auto x = lanes<float>(a);
    return vector_of<double, __m512d>([&](int i) { return x[i]; });
}
OUT_OF_LINE __m512 cvtph_ps(__m256i a) {
    auto x = lanes<uint16_t>(a);
    return vector_of<float, __m512>([&](int i) { return _cvtsh_ss(x[i]); });
}
OUT_OF_LINE __m256i cvtps_ph(__m512 a, int mode) {
    if (mode != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
    auto x = lanes<float>(a);
    return vector_of<uint16_t, __m256i>([&](int i) { return _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT); });
}
OUT_OF_LINE __m512d permutex2var_pd(__m512d a, __m512i index, __m512d b) {
    auto x = lanes<double>(a), y = lanes<double>(b);
    auto at = lanes<int64_t>(index);
    return vector_of<double, __m512d>([&](int i) { return at[i] & 8 ? y[at[i] & 7] : x[at[i] & 7]; });
}

// ---- BF16: denormal numbers are read and written as 0 ----
inline float flushed(float x) { return bits_of(x) & 0x7f800000u ? x : of_bits(bits_of(x) & 0x80000000u); }
OUT_OF_LINE __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    auto sum = lanes<float>(sums);
    auto x = lanes<uint16_t>(a), y = lanes<uint16_t>(b);
    return vector_of<float, __m512>([&](int i) {
        float total = flushed(sum[i]);
        for (int odd = 1; odd >= 0; odd--) {
            float left = flushed(of_bits(uint32_t(x[2 * i + odd]) << 16));
            float right = flushed(of_bits(uint32_t(y[2 * i + odd]) << 16));
            total = flushed(std::fma(left, right, total));
        }
        return total;
    });
}
OUT_OF_LINE __m256bh cvtneps_pbh(__m512 a) {
    auto x = lanes<float>(a);
    return vector_of<uint16_t, __m256bh>([&](int i) {
        uint32_t bits = bits_of(flushed(x[i]));
        if (x[i] != x[i]) return (bits >> 16) | 0x40;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    });
}

// ---- integers of 32 and 64 bits ----
OUT_OF_LINE __m512i add_epi32(__m512i a, __m512i b) {
    auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
    return vector_of<uint32_t, __m512i>([&](int i) { return x[i] + y[i]; });
}
OUT_OF_LINE __m512i max_epi32(__m512i a, __m512i b) {
    auto x = lanes<int32_t>(a), y = lanes<int32_t>(b);
    return vector_of<int32_t, __m512i>([&](int i) { return std::max(x[i], y[i]); });
}
OUT_OF_LINE int32_t reduce_max_epi32(__m512i a) {
    auto x = lanes<int32_t>(a);
    return *std::max_element(x.begin(), x.end());
}
OUT_OF_LINE int32_t reduce_add_epi32(__m512i a) {
    uint32_t sum = 0;
    for (uint32_t lane : lanes<uint32_t>(a)) sum += lane;
    return static_cast<int32_t>(sum);
}
OUT_OF_LINE __m512i cvtepu16_epi32(__m256i a) {
    auto x = lanes<uint16_t>(a);
    return vector_of<uint32_t, __m512i>([&](int i) { return x[i]; });
}
OUT_OF_LINE __m512i cvtepu8_epi32(__m128i a) {
    auto x = lanes<uint8_t>(a);
    return vector_of<uint32_t, __m512i>([&](int i) { return x[i]; });
}
OUT_OF_LINE __m128i cvtepi32_epi8(__m512i a) {
    auto x = lanes<uint32_t>(a);
    return vector_of<uint8_t, __m128i>([&](int i) { return x[i]; });
}
OUT_OF_LINE __m512i setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h) {
    int64_t x[8] = {a, b, c, d, e, f, g, h};
    return loaded<__m512i>(x);
}
OUT_OF_LINE __m512i permutexvar_epi64(__m512i index, __m512i a) {
    auto x = lanes<int64_t>(a), at = lanes<int64_t>(index);
    return vector_of<int64_t, __m512i>([&](int i) { return x[at[i] & 7]; });
}
OUT_OF_LINE __m512i and_si512(__m512i a, __m512i b) { return a & b; }
OUT_OF_LINE __m512i or_si512(__m512i a, __m512i b) { return a | b; }

// ---- integers of 16 bits ----
OUT_OF_LINE __m512i set1_epi16(int16_t x) {
    return vector_of<int16_t, __m512i>([&](int) { return x; });
}
OUT_OF_LINE __m512i slli_epi16(__m512i a, int by) {
    auto x = lanes<uint16_t>(a);
    return vector_of<uint16_t, __m512i>([&](int i) { return x[i] << by; });
}
OUT_OF_LINE __m512i srli_epi16(__m512i a, int by) {
    auto x = lanes<uint16_t>(a);
    return vector_of<uint16_t, __m512i>([&](int i) { return x[i] >> by; });
}
OUT_OF_LINE __m512i srai_epi16(__m512i a, int by) {
    auto x = lanes<int16_t>(a);
    return vector_of<int16_t, __m512i>([&](int i) { return x[i] >> by; });
}
inline uint32_t sum_of_pair(const std::array<int16_t, 32>& x, const std::array<int16_t, 32>& y, int pair) {
    return static_cast<uint32_t>(x[2 * pair] * y[2 * pair]) + static_cast<uint32_t>(x[2 * pair + 1] * y[2 * pair + 1]);
}
OUT_OF_LINE __m512i madd_epi16(__m512i a, __m512i b) {
    auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
    return vector_of<uint32_t, __m512i>([&](int i) { return sum_of_pair(x, y, i); });
}
OUT_OF_LINE __m512i maddubs_epi16(__m512i a, __m512i b) {
    auto x = lanes<uint8_t>(a);
    auto y = lanes<int8_t>(b);
    return vector_of<int16_t, __m512i>([&](int i) {
        return std::clamp(x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1], -32768, 32767);
    });
}

// ---- bytes ----
OUT_OF_LINE __m512i set1_epi8(char x) {
    return vector_of<char, __m512i>([&](int) { return x; });
}
OUT_OF_LINE __m512i abs_epi8(__m512i a) {
    auto x = lanes<int8_t>(a);
    return vector_of<int8_t, __m512i>([&](int i) { return x[i] < 0 ? -x[i] : x[i]; });
}
OUT_OF_LINE __m512i broadcast_i32x4(__m128i a) {
    auto x = lanes<uint8_t>(a);
    return vector_of<uint8_t, __m512i>([&](int i) { return x[i % 16]; });
}
OUT_OF_LINE __m512i shuffle_epi8(__m512i a, __m512i index) {
    auto x = lanes<uint8_t>(a), at = lanes<uint8_t>(index);
    return vector_of<uint8_t, __m512i>([&](int i) { return at[i] & 0x80 ? 0 : x[i / 16 * 16 + (at[i] & 15)]; });
}
OUT_OF_LINE __m512i permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
    auto x = lanes<uint8_t>(a), y = lanes<uint8_t>(b), at = lanes<uint8_t>(index);
    return vector_of<uint8_t, __m512i>([&](int i) { return at[i] & 64 ? y[at[i] & 63] : x[at[i] & 63]; });
}
inline __m512i interleaved(__m512i a, __m512i b, int half) {
    auto x = lanes<uint8_t>(a), y = lanes<uint8_t>(b);
    return vector_of<uint8_t, __m512i>([&](int i) {
        int from = i / 16 * 16 + 8 * half + i % 16 / 2;
        return i % 2 ? y[from] : x[from];
    });
}
OUT_OF_LINE __m512i unpacklo_epi8(__m512i a, __m512i b) { return interleaved(a, b, 0); }
OUT_OF_LINE __m512i unpackhi_epi8(__m512i a, __m512i b) { return interleaved(a, b, 1); }

// ---- VNNI, for the lines that the kernels have in assembly ----
template <class Sums, class Words>
OUT_OF_LINE Sums vpdpbusd(Sums sums, Words a, Words b) {
    auto sum = lanes<uint32_t>(sums);
    auto x = lanes<uint8_t>(a);
    auto y = lanes<int8_t>(b);
    return vector_of<uint32_t, Sums>([&](int i) {
        for (int byte = 4 * i; byte < 4 * i + 4; byte++) sum[i] += static_cast<uint32_t>(x[byte] * y[byte]);
        return sum[i];
    });
}
template <class Sums, class Words>
OUT_OF_LINE Sums vpdpwssd(Sums sums, Words a, Words b) {
    auto sum = lanes<uint32_t>(sums);
    auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
    return vector_of<uint32_t, Sums>([&](int i) { return sum[i] + sum_of_pair(x, y, i); });
}

}  // namespace software

#define _mm512_load_si512 software::load_si512
#define _mm512_loadu_si512 software::loadu_si512
#define _mm512_loadu_pd software::loadu_pd
#define _mm512_storeu_si512 software::storeu_si512
#define _mm512_fmadd_ps software::fmadd_ps
#define _mm512_fmadd_pd software::fmadd_pd
#define _mm512_max_ps software::max_ps
#define _mm512_reduce_max_ps software::reduce_max_ps
#define _mm512_roundscale_ps software::roundscale_ps
#define _mm512_scalef_ps software::scalef_ps
#define _mm512_cvtps_epi32 software::cvtps_epi32
#define _mm512_cvtps_pd software::cvtps_pd
#define _mm512_cvtph_ps software::cvtph_ps
#define _mm512_cvtps_ph software::cvtps_ph
#define _mm512_permutex2var_pd software::permutex2var_pd
#define _mm512_dpbf16_ps software::dpbf16_ps
#define _mm512_cvtneps_pbh software::cvtneps_pbh
#define _mm512_add_epi32 software::add_epi32
#define _mm512_max_epi32 software::max_epi32
#define _mm512_reduce_max_epi32 software::reduce_max_epi32
#define _mm512_reduce_add_epi32 software::reduce_add_epi32
#define _mm512_cvtepu16_epi32 software::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 software::cvtepu8_epi32
#define _mm512_cvtepi32_epi8 software::cvtepi32_epi8
#undef _mm512_setr_epi64  // a macro, of g++
#define _mm512_setr_epi64 software::setr_epi64
#define _mm512_permutexvar_epi64 software::permutexvar_epi64
#define _mm512_and_si512 software::and_si512
#define _mm512_or_si512 software::or_si512
#define _mm512_set1_epi16 software::set1_epi16
#define _mm512_slli_epi16 software::slli_epi16
#define _mm512_srli_epi16 software::srli_epi16
#define _mm512_srai_epi16 software::srai_epi16
#define _mm512_madd_epi16 software::madd_epi16
#define _mm512_maddubs_epi16 software::maddubs_epi16
#define _mm512_set1_epi8 software::set1_epi8
#define _mm512_abs_epi8 software::abs_epi8
#define _mm512_broadcast_i32x4 software::broadcast_i32x4
#define _mm512_shuffle_epi8 software::shuffle_epi8
#define _mm512_permutex2var_epi8 software::permutex2var_epi8
#define _mm512_unpacklo_epi8 software::unpacklo_epi8
#define _mm512_unpackhi_epi8 software::unpackhi_epi8
#define _mm256_mask_loadu_ps software::mask_loadu_ps

#if defined(SOFTWARE_AVX_VNNI)
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#endif
#if defined(SOFTWARE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(SOFTWARE_VBMI)
#define __AVX512VBMI__ 1
#endif
#if defined(SOFTWARE_BF16)
#define __AVX512BF16__ 1
#endif
