// The product of up to MAX_ROWS rows of words and a panel of PANEL columns: the inner loop of linears and attention.
#pragma once

#include "vectors.h"

constexpr int PANEL = 2 * LANES;  // columns
constexpr int MAX_ROWS = 12;      // 24 accumulators, two vectors of the panel, and registers to spare

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A panel as the product reads it: for each word the left and the right 16 columns, `stride` bytes from one to the next.
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

// sums[r] += x[r] · panel, where x has R rows (word k of row r at x[r · row_stride + k · word_stride]). Every sum is
// made in the order of k in one lane, so that a row's result does not depend on R. AHEAD: how many bytes are fetched
// in advance where few rows wait for memory; none where the processor by itself fetches far enough.
template <class Format, int R, int AHEAD = 0>
inline __attribute__((always_inline)) void multiply(const uint32_t* x, int64_t row_stride, int64_t word_stride,
                                                    Columns panel, int64_t words, typename Format::Sum (&sums)[R][2]) {
    typename Format::Sum local[R][2];  // what the compiler keeps in registers
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
