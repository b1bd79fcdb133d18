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

// A number format: its value type, the values per word, the accumulator, and sum += w · x for words.
//
// Without an instruction for words, a product consists of PARTS, which are added one after the other.
// An Operand is a word x that is prepared for them, because the same x meets many w.

struct Float32 {
    using Value = float;
    using Sum = f32x16;
    using Operand = float;
    static constexpr int PER_WORD = 1, PARTS = 1;

    static Operand operand(uint32_t x) { return as_float(x); }

    template <int>
    static Sum add_part(Sum sum, u32x16 w, Operand x) {
        return sum + (f32x16)w * x;
    }
};

struct BFloat16 {
    using Value = uint16_t;
    using Sum = f32x16;
    static constexpr int PER_WORD = 2;
#if defined(__AVX512BF16__)
    using Operand = uint32_t;
    static constexpr int PARTS = 1;

    static Operand operand(uint32_t x) { return x; }

    template <int>
    static Sum add_part(Sum sum, u32x16 w, Operand x) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
    }
#else
    struct Operand {
        float values[2];
    };
    static constexpr int PARTS = 2;

    static Operand operand(uint32_t x) { return {as_float(x << 16), as_float(x & 0xffff0000u)}; }

    template <int part>
    static Sum add_part(Sum sum, u32x16 w, const Operand& x) {
        return sum + (f32x16)(part ? w & 0xffff0000u : w << 16) * x.values[part];
    }
#endif
};

// w is signed, and x is unsigned.
struct Int8 {
    using Value = uint8_t;
    using Sum = i32x16;
    static constexpr int PER_WORD = 4;
#if defined(__AVX512VNNI__)
    using Operand = uint32_t;
    static constexpr int PARTS = 1;

    static Operand operand(uint32_t x) { return x; }

    template <int>
    static Sum add_part(Sum sum, u32x16 w, Operand x) {
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)x), (__m512i)w);
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // The even and the odd bytes, as 16-bit numbers.
    struct Operand {
        int32_t pairs[2];
    };
    static constexpr int PARTS = 2;

    static Operand operand(uint32_t x) { return {{(int32_t)(x & 0x00ff00ff), (int32_t)(x >> 8 & 0x00ff00ff)}}; }

    template <int part>
    static Sum add_part(Sum sum, u32x16 w, const Operand& x) {
        const __m256i pair = _mm256_set1_epi32(x.pairs[part]);
        return {add_pairs<part>(sum.low, (__m256i)w.low, pair), add_pairs<part>(sum.high, (__m256i)w.high, pair)};
    }

  private:
    template <int part>
    static decltype(Sum::low) add_pairs(decltype(Sum::low) sum, __m256i w, __m256i x) {
        const __m256i bytes = _mm256_srai_epi16(part ? w : _mm256_slli_epi16(w, 8), 8);
        return sum + (decltype(sum))_mm256_madd_epi16(bytes, x);
    }
#else
    using Operand = uint32_t;
    static constexpr int PARTS = 1;

    static Operand operand(uint32_t x) { return x; }

    template <int>
    static Sum add_part(Sum sum, u32x16 w, Operand x) {
        for (int bit = 0; bit < 32; bit += 8)
            sum += ((i32x16)(w << (24 - bit)) >> 24) * (int32_t)(x >> bit & 255);
        return sum;
    }
#endif
};

// The indices of the parts, to be expanded.
template <class Format>
using Parts = std::make_integer_sequence<int, Format::PARTS>;

// sum + w · x.
template <class Format, int... part>
inline typename Format::Sum add_product(typename Format::Sum sum, u32x16 w, const typename Format::Operand& x,
                                        std::integer_sequence<int, part...>) {
    ((sum = Format::template add_part<part>(sum, w, x)), ...);
    return sum;
}
