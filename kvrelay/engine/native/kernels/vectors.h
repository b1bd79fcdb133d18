// Vectors of sixteen float32: loads and stores for float32 and bfloat16 memory, and math functions.
#pragma once

#include <algorithm>

#include "words.h"

// Rounds to nearest even, like torch.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline f32x16 load(const float* from) { return read_as<f32x16>(from); }
inline f32x16 load(const uint16_t* from) { return (f32x16)(read_as<u32x16>(from) << 16); }

inline void store(float* to, f32x16 values) { write_as(to, values); }

inline void store(uint16_t* to, f32x16 values) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)values);
    memcpy(to, &half, sizeof half);
#else
    u32x16 bits = (u32x16)values;
    u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    write_as(to, select(values == values, rounded, splat((uint32_t)0x7fc0)));
#endif
}

inline float to_float(float value) { return value; }
inline float to_float(uint16_t bits) { return as_float((uint32_t)bits << 16); }
inline void put(float* to, float value) { *to = value; }
inline void put(uint16_t* to, float value) { *to = to_bfloat16(value); }

// Loads the first `count` < 16 values of a vector; the others are zero.
template <class T>
inline f32x16 load_some(const T* from, int64_t count) {
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
inline f32x16 load_most(const T* from, int64_t count) {
    return count >= LANES ? load(from) : load_some(from, count);
}

template <class T>
inline void store_some(T* to, f32x16 values, int64_t count) {
    T padded[LANES];
    store(padded, values);
    memcpy(to, padded, count * sizeof(T));
}

// The values after rounding to T.
template <class T>
inline f32x16 rounded(f32x16 values) {
    T memory[LANES];
    store(memory, values);
    return load(memory);
}

// The values n - 8 of two int4 numbers n in each lane, in the low bits of its halves, as two bfloat16,
// which hold them exactly.
inline u32x16 int4_pairs(u32x16 pairs) {
#if defined(__AVX512BW__)
    static constexpr uint16_t value[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    };
    return (u32x16)_mm512_permutexvar_epi16((__m512i)pairs, _mm512_loadu_si512(value));
#else
    return ((u32x16)to_floats((i32x16)(pairs & 15) - 8) >> 16) + (u32x16)to_floats((i32x16)(pairs >> 16) - 8);
#endif
}

inline f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    // Returns the second operand if either is NaN, like the other branch.
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}
inline f32x16 minimum(f32x16 a, f32x16 b) { return select(a < b, a, b); }

// Reduces the sixteen lanes to one value by combining halves.
template <class Combine>
inline float reduce(f32x16 values, Combine combine) {
    auto eight = combine(half_of<false>(values), half_of<true>(values));
    auto four = combine(half_of<false>(eight), half_of<true>(eight));
    auto two = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    return combine(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
}

inline float sum_of(f32x16 values) {
    return reduce(values, [](auto a, auto b) { return a + b; });
}

inline float max_of(f32x16 values) {
    return reduce(values, [](auto a, auto b) { return select(a > b, a, b); });
}

// Returns the largest |x|, or NaN if a value is NaN. As integers, magnitudes have the order of the
// numbers, and NaN is larger than all of them.
template <class T>
inline float largest_magnitude(const T* from, int64_t count) {
    i32x16 most{};
    for (int64_t i = 0; i < count; i += LANES) {
        const i32x16 magnitudes = (i32x16)load_most(from + i, count - i) & 0x7fffffff;
        most = select(magnitudes > most, magnitudes, most);
    }
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max<int32_t>(largest, most[lane]);
    return as_float(largest);
}

// Returns e^x to within 2 units in the last place: 2^n · e^r with |r| ≤ ln 2 / 2, and the Taylor
// polynomial of degree 7 for e^r. NaN stays NaN, because minimum and maximum return their second
// argument for NaN.
inline f32x16 exponential(f32x16 x) {
    x = minimum(splat(88.0f), maximum(splat(-87.0f), x));
    // Adding 1.5 · 2^23 puts the integer nearest to x / ln 2 into the low bits.
    f32x16 shifted = x * 1.44269504f + 12582912.0f;
    f32x16 n = shifted - 12582912.0f;
    f32x16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 e = splat(1.0f / 5040);
    for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) e = e * r + coefficient;
    return (f32x16)((i32x16)e + ((i32x16)shifted << 23));
}

inline f32x16 silu(f32x16 x) { return x / (exponential(-x) + 1.0f); }

// Returns 2^x to within 2 units in the last place, and at least 2^-126: 2^n · 2^r with |r| ≤ 1/2,
// and the Taylor polynomial of degree 7 for e^(r ln 2).
inline f32x16 power_of_two(f32x16 x) {
    x = maximum(splat(-126.0f), x);
    const f32x16 shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);
    f32x16 p = splat(1.5252734e-5f);
    for (float coefficient : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        p = p * r + coefficient;
    return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}

// Returns 2^x to within 1 part in 13,000, a thirtieth of the rounding error of bfloat16, and at
// least 2^-126.
inline f32x16 rough_power_of_two(f32x16 x) {
    x = maximum(splat(-126.0f), x);
    const f32x16 shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);
    const f32x16 p = ((r * 0.05517167f + 0.24261112f) * r + 0.69326099f) * r + 0.99992807f;
    return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}
