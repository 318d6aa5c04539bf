// Vectors of a fixed number of lanes, on any CPU.
//
// With AVX-512 they are the compiler's own 64-byte vectors. Elsewhere they are made of vectors that fit the CPU's
// registers: the compiler keeps 64-byte vectors in memory there, which costs a factor of four to eight. All lanes do the
// same, so both forms give the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGODA_AVX512 1
#endif
#if defined(PAGODA_AVX512) && defined(__AVX512BF16__)
#define PAGODA_AVX512_BF16 1
#endif
#if !defined(PAGODA_AVX512) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGODA_AVX2 1
#endif

template <class T, int BYTES>
struct VectorOf {
    typedef T type __attribute__((vector_size(BYTES)));
};

template <class V>
constexpr bool IS_PAIR = false;

#if defined(PAGODA_AVX512)

template <class T, int LANES>
using LanesOf = typename VectorOf<T, LANES * int(sizeof(T))>::type;

#else

// Two halves, each a vector or again a pair. Operators work lane by lane, like those of the compiler's vectors: a
// comparison gives -1 or 0 in integer lanes, and a conversion by a cast keeps the bits.
template <class Half>
struct Pair {
    using Element = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<Half&>()[0])>>;
    static constexpr int HALF_LANES = sizeof(Half) / sizeof(Element);
    Half low, high;

    Pair() = default;
    Pair(Half low_half, Half high_half) : low(low_half), high(high_half) {}
    template <class Other>
    explicit Pair(Pair<Other> bits) : low((Half)bits.low), high((Half)bits.high) {}

    Element operator[](int lane) const { return lane < HALF_LANES ? low[lane] : high[lane - HALF_LANES]; }
    Pair operator-() const { return {-low, -high}; }

#define PAGODA_LANEWISE(op)                                                                      \
    friend Pair operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }       \
    friend Pair operator op(Pair a, Element b) { return {a.low op b, a.high op b}; }             \
    friend Pair operator op(Element a, Pair b) { return {a op b.low, a op b.high}; }             \
    friend Pair& operator op##=(Pair & a, Pair b) { return a = a op b; }                         \
    friend Pair& operator op##=(Pair & a, Element b) { return a = a op b; }
    PAGODA_LANEWISE(+)
    PAGODA_LANEWISE(-)
    PAGODA_LANEWISE(*)
    PAGODA_LANEWISE(/)
    PAGODA_LANEWISE(&)
    PAGODA_LANEWISE(|)
#undef PAGODA_LANEWISE
    friend Pair operator<<(Pair a, int b) { return {a.low << b, a.high << b}; }
    friend Pair operator>>(Pair a, int b) { return {a.low >> b, a.high >> b}; }

#define PAGODA_COMPARISON(op)                                                                    \
    friend auto operator op(Pair a, Pair b) {                                                    \
        return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};                 \
    }                                                                                            \
    friend auto operator op(Pair a, Element b) {                                                 \
        return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                              \
    }
    PAGODA_COMPARISON(==)
    PAGODA_COMPARISON(!=)
    PAGODA_COMPARISON(<)
    PAGODA_COMPARISON(<=)
    PAGODA_COMPARISON(>)
    PAGODA_COMPARISON(>=)
#undef PAGODA_COMPARISON
};

template <class Half>
constexpr bool IS_PAIR<Pair<Half>> = true;

#if defined(PAGODA_AVX2)
template <class T, int LANES>
using LanesOf = Pair<typename VectorOf<T, LANES * int(sizeof(T)) / 2>::type>;
#else
template <class T, int LANES>
using LanesOf = Pair<Pair<typename VectorOf<T, LANES * int(sizeof(T)) / 4>::type>>;
#endif

#endif

typedef LanesOf<float, 16> f32x16;
typedef LanesOf<int32_t, 16> i32x16;
typedef LanesOf<uint32_t, 16> u32x16;
typedef LanesOf<uint16_t, 16> u16x16;
typedef LanesOf<float, 8> f32x8;
typedef LanesOf<double, 8> f64x8;
typedef LanesOf<int64_t, 8> i64x8;
typedef LanesOf<uint64_t, 8> u64x8;
typedef LanesOf<uint16_t, 8> u16x8;

// ---- what the operators do not offer, for one vector and for pairs ----

// From and to memory of any alignment. (One copy of all 64 bytes would keep a pair in memory.)
template <class V>
inline V load_as(const void* from) {
    if constexpr (IS_PAIR<V>) {
        return {load_as<decltype(V::low)>(from), load_as<decltype(V::high)>((const char*)from + sizeof(V) / 2)};
    } else {
        V v;
        memcpy(&v, from, sizeof(V));
        return v;
    }
}
template <class V>
inline void store_lanes_of(void* to, V v) {
    if constexpr (IS_PAIR<V>) {
        store_lanes_of(to, v.low);
        store_lanes_of((char*)to + sizeof(V) / 2, v.high);
    } else {
        memcpy(to, &v, sizeof(V));
    }
}

// In each lane: mask ? a : b.
template <class Mask, class V>
inline V select(Mask mask, V a, V b) {
    if constexpr (IS_PAIR<V>)
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

// Numbers converted lane by lane.
template <class To, class From>
inline To converted(From v) {
    if constexpr (IS_PAIR<To>)
        return {converted<decltype(To::low)>(v.low), converted<decltype(To::high)>(v.high)};
    else
        return __builtin_convertvector(v, To);
}
