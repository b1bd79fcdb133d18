// Words (packed elements of four bytes) and vectors of sixteen words. A word holds one float32, two
// bfloat16 or four int8 values.
//
// In every number format, a product adds words to one accumulator per lane. GCC's vector extension
// compiles this code for any processor. If the processor has an instruction for the product of two
// words, the code uses the instruction.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int LANES = 16;

inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// A number format: its value type, the values per word, the accumulator, and sum += w · x for
// words.

struct Float32 {
    using Value = float;
    using Sum = f32x16;
    static constexpr int PER_WORD = 1;

    static Sum add_product(Sum sum, u32x16 w, uint32_t x) { return sum + (f32x16)w * as_float(x); }
};

struct BFloat16 {
    using Value = uint16_t;
    using Sum = f32x16;
    static constexpr int PER_WORD = 2;

    static Sum add_product(Sum sum, u32x16 w, uint32_t x) {
#if defined(__AVX512BF16__)
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
        sum += (f32x16)(w << 16) * as_float(x << 16);
        return sum + (f32x16)(w & 0xffff0000u) * as_float(x & 0xffff0000u);
#endif
    }
};

// The instruction takes a signed w and an unsigned x.
struct Int8 {
    using Value = uint8_t;
    using Sum = i32x16;
    static constexpr int PER_WORD = 4;

    static Sum add_product(Sum sum, u32x16 w, uint32_t x) {
#if defined(__AVX512VNNI__)
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)x), (__m512i)w);
#else
        for (int bit = 0; bit < 32; bit += 8)
            sum += ((i32x16)(w << (24 - bit)) >> 24) * (int32_t)(x >> bit & 255);
        return sum;
#endif
    }
};
