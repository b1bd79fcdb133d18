// Words (packed elements of four bytes) and vectors of sixteen words. A word holds one float32, two
// bfloat16 or four int8 values.
//
// In every number format, a product adds words to one accumulator per lane. The code compiles for any
// processor. If the processor has an instruction for the product of two words, the code uses the
// instruction.
#pragma once

#include "lanes.h"

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
        const u32x16 words = splat(x);
        sum += (f32x16)(w << 16) * (f32x16)(words << 16);
        return sum + (f32x16)(w & 0xffff0000u) * (f32x16)(words & 0xffff0000u);
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
#elif defined(__AVX2__) && !defined(__AVX512F__)
        const __m256i words = _mm256_set1_epi32((int)x);
        return {add_pairs(sum.low, (__m256i)w.low, words), add_pairs(sum.high, (__m256i)w.high, words)};
#else
        for (int bit = 0; bit < 32; bit += 8)
            sum += ((i32x16)(w << (24 - bit)) >> 24) * (int32_t)(x >> bit & 255);
        return sum;
#endif
    }

#if defined(__AVX2__) && !defined(__AVX512F__)
  private:
    // Products of 16 bits, summed in pairs: of the even bytes, and of the odd ones.
    static decltype(Sum::low) add_pairs(decltype(Sum::low) sum, __m256i w, __m256i x) {
        const __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8),
                                               _mm256_and_si256(x, _mm256_set1_epi16(255)));
        const __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(w, 8), _mm256_srli_epi16(x, 8));
        return sum + (decltype(sum))even + (decltype(sum))odd;
    }
#endif
};
