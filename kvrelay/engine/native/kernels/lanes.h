// Vectors of sixteen lanes. A vector that fits into a register of the processor is a vector of GCC.
// A wider one is a pair of halves: GCC keeps vectors that are wider than a register in memory, and
// shifts and compares their lanes one by one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
// Lanes of a register.
#if defined(__AVX512F__)
constexpr int NATIVE_LANES = 16;
#elif defined(__AVX2__)
constexpr int NATIVE_LANES = 8;
#else
constexpr int NATIVE_LANES = 4;
#endif

template <class T, int N>
struct Native {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <class T, int N>
struct Pair;

template <class T, int N>
using Vector = std::conditional_t<N <= NATIVE_LANES, Native<T, N>, std::type_identity<Pair<T, N>>>::type;

template <class T, int N>
struct Pair {
    Vector<T, N / 2> low, high;

    // The same bits as lanes of another type.
    template <class To>
    explicit operator Pair<To, N>() const {
        return {(Vector<To, N / 2>)low, (Vector<To, N / 2>)high};
    }

    T& operator[](int lane) { return ((T*)this)[lane]; }
    T operator[](int lane) const { return ((const T*)this)[lane]; }

    friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
#define KVRELAY_LANEWISE(op)                                                                    \
    friend Pair operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }      \
    friend Pair operator op(Pair a, T b) { return {a.low op b, a.high op b}; }                  \
    friend Pair operator op(T a, Pair b) { return {a op b.low, a op b.high}; }                  \
    Pair& operator op##=(Pair other) { return *this = *this op other; }                         \
    Pair& operator op##=(T other) { return *this = *this op other; }
    KVRELAY_LANEWISE(+)
    KVRELAY_LANEWISE(-)
    KVRELAY_LANEWISE(*)
    KVRELAY_LANEWISE(/)
    KVRELAY_LANEWISE(&)
    KVRELAY_LANEWISE(<<)
    KVRELAY_LANEWISE(>>)
#undef KVRELAY_LANEWISE
#define KVRELAY_COMPARISON(op)                                                                        \
    friend Pair<int32_t, N> operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; } \
    friend Pair<int32_t, N> operator op(Pair a, T b) { return {a.low op b, a.high op b}; }
    KVRELAY_COMPARISON(==)
    KVRELAY_COMPARISON(<)
    KVRELAY_COMPARISON(<=)
    KVRELAY_COMPARISON(>)
    KVRELAY_COMPARISON(>=)
#undef KVRELAY_COMPARISON
};

typedef Vector<float, LANES> f32x16;
typedef Vector<int32_t, LANES> i32x16;
typedef Vector<uint32_t, LANES> u32x16;

template <class V>
concept IsPair = requires(V values) { values.low; };

// a where a lane of the mask is set, else b.
template <class Mask, class V>
inline V select(Mask mask, V a, V b) {
    if constexpr (IsPair<V>)
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

// A register of four-byte numbers from narrower ones, and back, without the higher bits. GCC converts
// vectors of bytes lane by lane, which takes ten times as long.
#if defined(__AVX512F__)
#define KVRELAY_NARROW
typedef Native<int32_t, 16>::type Register;
inline Register widened(const uint8_t* from) { return (Register)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline Register widened(const int8_t* from) { return (Register)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline Register widened(const uint16_t* from) { return (Register)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
inline void narrow(uint8_t* to, Register values) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values)); }
inline void narrow(uint16_t* to, Register values) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)values)); }
#elif defined(__AVX2__)
#define KVRELAY_NARROW
typedef Native<int32_t, 8>::type Register;
inline Register widened(const uint8_t* from) { return (Register)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline Register widened(const int8_t* from) { return (Register)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline Register widened(const uint16_t* from) { return (Register)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline void narrow(uint8_t* to, Register values) {
    // The low byte of each number, in the first four bytes of each half.
    const __m256i low = _mm256_shuffle_epi8((__m256i)values, _mm256_set1_epi32(0x0c080400));
    const int32_t halves[] = {_mm256_extract_epi32(low, 0), _mm256_extract_epi32(low, 4)};
    memcpy(to, halves, sizeof halves);
}
inline void narrow(uint16_t* to, Register values) {
    const __m256i low = _mm256_and_si256((__m256i)values, _mm256_set1_epi32(0xffff));
    // Packs each half by itself.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0b1000);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(packed));
}
#endif

// Reads as many adjacent numbers as V has lanes, and converts them to the type of the lanes.
template <class V, class From>
inline V read_as(const From* from) {
    if constexpr (IsPair<V>) {
        using Half = decltype(V::low);
        return {read_as<Half>(from), read_as<Half>(from + sizeof(Half) / 4)};
#if defined(KVRELAY_NARROW)
    } else if constexpr (sizeof(From) < 4) {
        return __builtin_convertvector(widened(from), V);
#endif
    } else {
        typename Native<From, sizeof(V) / 4>::type numbers;
        memcpy(&numbers, from, sizeof numbers);
        return __builtin_convertvector(numbers, V);
    }
}

// Converts the lanes to another type, and writes them to memory.
template <class To, class V>
inline void write_as(To* to, V values) {
    if constexpr (IsPair<V>) {
        write_as(to, values.low);
        write_as(to + sizeof(values.low) / 4, values.high);
#if defined(KVRELAY_NARROW)
    } else if constexpr (sizeof(To) < 4) {
        narrow(to, (Register)values);
#endif
    } else {
        auto numbers = __builtin_convertvector(values, typename Native<To, sizeof(V) / 4>::type);
        memcpy(to, &numbers, sizeof numbers);
    }
}

// The nearest float32 numbers.
template <class V>
inline auto to_floats(V values) {
    if constexpr (IsPair<V>)
        return Pair<float, sizeof(V) / 4>{to_floats(values.low), to_floats(values.high)};
    else
        return __builtin_convertvector(values, typename Native<float, sizeof(V) / 4>::type);
}

// The lower or the higher half of a vector of four-byte numbers.
template <bool high, class V>
inline auto half_of(V values) {
    if constexpr (IsPair<V>) {
        return high ? values.high : values.low;
    } else {
        constexpr int count = sizeof(V) / 8, first = high ? count : 0;
        return [&]<int... lane>(std::integer_sequence<int, lane...>) {
            return __builtin_shufflevector(values, values, (first + lane)...);
        }(std::make_integer_sequence<int, count>{});
    }
}

// A difference, because a sum with zero would turn -0 into 0.
inline f32x16 splat(float value) { return value - f32x16{}; }
inline u32x16 splat(uint32_t value) { return value - u32x16{}; }
