// The product of up to MAX_ROWS rows of words and a panel of PANEL columns. It is the inner loop of
// linear layers and attention.
#pragma once

#include "vectors.h"

// Columns.
constexpr int PANEL = 2 * LANES;
constexpr int MAX_ROWS = 12;
// Rows whose sums fit into the registers together with the words of the panel: over all columns, and
// over half of them. AVX-512 has 32 registers of 16 lanes, AVX2 has 16 of 8, others have 16 or more
// of 4.
constexpr int ROWS_OF_PANEL = NATIVE_LANES == 16 ? 12 : NATIVE_LANES == 8 ? 3 : 1;
constexpr int ROWS_OF_HALF = NATIVE_LANES == 8 ? 6 : 3;

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The operand of a product: for each word, the left and the right 16 columns, with `stride` bytes
// from one word to the next.
struct Columns {
    const void* left;
    const void* right;
    int64_t stride;
};

// Rows whose sums stay in registers. HALVES: of the columns, one or two, from `columns` on.
template <class Format, int R, int HALVES, int AHEAD>
inline __attribute__((always_inline)) void multiply_in_registers(const uint32_t* x, int64_t row_stride, int64_t word_stride,
                                                                 const void* const* columns, int64_t stride, int64_t words,
                                                                 typename Format::Sum (*sums)[2]) {
    typename Format::Sum local[R][HALVES];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < HALVES; half++) local[r][half] = sums[r][half];
    for (int64_t k = 0; k < words; k++) {
        u32x16 panel[HALVES];
        for (int half = 0; half < HALVES; half++) {
            const char* at = (const char*)columns[half] + k * stride;
            panel[half] = read_as<u32x16>((const uint32_t*)at);
            if (AHEAD && R <= 8) __builtin_prefetch(at + AHEAD);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const uint32_t word = x[r * row_stride + k * word_stride];
            for (int half = 0; half < HALVES; half++)
                local[r][half] = Format::add_product(local[r][half], panel[half], word);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < HALVES; half++) sums[r][half] = local[r][half];
}

// sums[r] += x[r] · panel. x has R rows; word k of row r is at x[r · row_stride + k · word_stride].
// One lane computes each sum in the order of k, so the result of a row does not depend on R. AHEAD:
// distance of the prefetch in bytes, for few rows that wait for memory; 0 if the processor's own
// prefetch is sufficient.
template <class Format, int R, int AHEAD = 0, int FIRST = 0>
inline __attribute__((always_inline)) void multiply(const uint32_t* x, int64_t row_stride, int64_t word_stride,
                                                    Columns panel, int64_t words, typename Format::Sum (&sums)[R][2]) {
    const void* const columns[] = {panel.left, panel.right};
    if constexpr (R <= ROWS_OF_PANEL) {
        multiply_in_registers<Format, R, 2, AHEAD>(x, row_stride, word_stride, columns, panel.stride, words, sums);
    } else {
        // Groups of equal size, as far as possible.
        constexpr int LEFT = R - FIRST, GROUPS = (LEFT + ROWS_OF_HALF - 1) / ROWS_OF_HALF, COUNT = (LEFT + GROUPS - 1) / GROUPS;
        for (int half = 0; half < 2; half++)
            multiply_in_registers<Format, COUNT, 1, 0>(x + FIRST * row_stride, row_stride, word_stride, columns + half, panel.stride,
                                                       words, (typename Format::Sum(*)[2])(sums[FIRST] + half));
        if constexpr (FIRST + COUNT < R)
            multiply<Format, R, AHEAD, FIRST + COUNT>(x, row_stride, word_stride, panel, words, sums);
    }
}

// Calls body.template operator()<R>() for R = rows, which is 1 to MAX_ROWS.
template <class Body, int R = MAX_ROWS>
inline void with_rows(int64_t rows, Body&& body) {
    if constexpr (R > 1) {
        if (rows < R) return with_rows<Body, R - 1>(rows, static_cast<Body&&>(body));
    }
    body.template operator()<R>();
}
