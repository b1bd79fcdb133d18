// The product of up to MAX_ROWS rows of words and a panel of PANEL columns. It is the inner loop of
// linear layers and attention.
#pragma once

#include "vectors.h"

// Columns.
constexpr int PANEL = 2 * LANES;
// 24 accumulators and two vectors of the panel leave some registers free.
constexpr int MAX_ROWS = 12;

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The operand of a product: for each word, the left and the right 16 columns, with `stride` bytes
// from one word to the next.
struct Columns {
    const void* left;
    const void* right;
    int64_t stride;
};

inline u32x16 vector_at(const void* base, int64_t offset) {
    u32x16 words;
    memcpy(&words, (const char*)base + offset, sizeof words);
    return words;
}

// sums[r] += x[r] · panel. x has R rows; word k of row r is at x[r · row_stride + k · word_stride].
// One lane computes each sum in the order of k, so the result of a row does not depend on R. AHEAD:
// distance of the prefetch in bytes, for few rows that wait for memory; 0 if the processor's own
// prefetch is sufficient.
template <class Format, int R, int AHEAD = 0>
inline __attribute__((always_inline)) void multiply(const uint32_t* x, int64_t row_stride, int64_t word_stride,
                                                    Columns panel, int64_t words, typename Format::Sum (&sums)[R][2]) {
    // The compiler keeps these in registers.
    typename Format::Sum local[R][2];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) local[r][half] = sums[r][half];
    for (int64_t k = 0; k < words; k++) {
        const u32x16 left = vector_at(panel.left, k * panel.stride), right = vector_at(panel.right, k * panel.stride);
        if (AHEAD && R <= 8) {
            __builtin_prefetch((const char*)panel.left + k * panel.stride + AHEAD);
            __builtin_prefetch((const char*)panel.right + k * panel.stride + AHEAD);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const uint32_t word = x[r * row_stride + k * word_stride];
            local[r][0] = Format::add_product(local[r][0], left, word);
            local[r][1] = Format::add_product(local[r][1], right, word);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) sums[r][half] = local[r][half];
}

// Calls body.template operator()<R>() for R = rows, which is 1 to MAX_ROWS.
template <class Body, int R = MAX_ROWS>
inline void with_rows(int64_t rows, Body&& body) {
    if constexpr (R > 1) {
        if (rows < R) return with_rows<Body, R - 1>(rows, static_cast<Body&&>(body));
    }
    body.template operator()<R>();
}
