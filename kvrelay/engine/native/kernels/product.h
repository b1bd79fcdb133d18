// The product of up to MAX_ROWS rows of words and a panel of PANEL columns. It is the inner loop of
// linear layers and attention.
#pragma once

#include <type_traits>

#include "vectors.h"

// Columns.
constexpr int PANEL = 2 * LANES;
constexpr int MAX_ROWS = 12;
// Rows whose sums fit into the registers together with the words of the panel: over all columns, and
// over half of them. AVX-512 has 32 registers of 16 lanes, AVX2 has 16 of 8, 64-bit ARM has 32 of 4,
// others have 16 or more of 4.
constexpr int ROWS_OF_PANEL = NATIVE_LANES == 16 ? 12 : NATIVE_LANES == 8 ? 3 : 1;
#if defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS_OF_HALF = 6;
#else
constexpr int ROWS_OF_HALF = 3;
#endif
// Words of a panel that stay in the first-level cache while all groups of rows use them.
constexpr int64_t WORDS_IN_CACHE = 64;

// Whether words are operands as they are.
template <class Format>
constexpr bool WORDS_ARE_OPERANDS = sizeof(typename Format::Operand) == sizeof(uint32_t);

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The operand of a product: for each word, the left and the right 16 columns, with `stride` bytes
// from one word to the next.
struct Columns {
    const void* left;
    const void* right;
    int64_t stride;
};

// Adds a part of the products of a word of each row.
template <class Format, int part, int R, int HALVES>
inline __attribute__((always_inline)) void add_rows(const typename Format::Operand* x, int64_t row_stride,
                                                    const u32x16 (&panel)[HALVES],
                                                    typename Format::Sum (&sums)[R][HALVES]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        for (int half = 0; half < HALVES; half++)
            sums[r][half] = Format::template add_part<part>(sums[r][half], panel[half], x[r * row_stride]);
}

// Rows whose sums stay in registers. HALVES: of the columns, one or two, from `columns` on.
template <class Format, int R, int HALVES, int AHEAD>
inline __attribute__((always_inline)) void multiply_in_registers(const typename Format::Operand* x, int64_t row_stride,
                                                                 int64_t word_stride, const void* const* columns, int64_t stride, int64_t words,
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
        // All rows use a part before the next part, whose factors then take the same registers.
        [&]<int... part>(std::integer_sequence<int, part...>) {
            (add_rows<Format, part>(x + k * word_stride, row_stride, panel, local), ...);
        }(Parts<Format>{});
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < HALVES; half++) sums[r][half] = local[r][half];
}

// One half of the columns after the other, a group of rows after the other.
template <class Format, int R, int AHEAD, int FIRST = 0>
inline __attribute__((always_inline)) void multiply_by_halves(const typename Format::Operand* x, int64_t row_stride,
                                                              int64_t word_stride, Columns panel, int64_t words,
                                                              typename Format::Sum (&sums)[R][2]) {
    // Groups of equal size, as far as possible.
    constexpr int LEFT = R - FIRST, GROUPS = (LEFT + ROWS_OF_HALF - 1) / ROWS_OF_HALF;
    constexpr int COUNT = (LEFT + GROUPS - 1) / GROUPS;
    const void* const columns[] = {panel.left, panel.right};
    for (int half = 0; half < 2; half++)
        multiply_in_registers<Format, COUNT, 1, AHEAD>(x + FIRST * row_stride, row_stride, word_stride, columns + half,
                                                       panel.stride, words,
                                                       (typename Format::Sum(*)[2])(sums[FIRST] + half));
    if constexpr (FIRST + COUNT < R)
        multiply_by_halves<Format, R, 0, FIRST + COUNT>(x, row_stride, word_stride, panel, words, sums);
}

// sums[r] += x[r] · panel. x has R rows; word k of row r is at x[r · row_stride + k · word_stride].
// One lane computes each sum in the order of k, so the result of a row does not depend on R. AHEAD:
// distance of the prefetch in bytes, for few rows that wait for memory; 0 if the processor's own
// prefetch is sufficient.
template <class Format, int R, int AHEAD = 0>
inline __attribute__((always_inline)) void multiply(const typename Format::Operand* x, int64_t row_stride,
                                                    int64_t word_stride, Columns panel, int64_t words,
                                                    typename Format::Sum (&sums)[R][2]) {
    if constexpr (R <= ROWS_OF_PANEL) {
        const void* const columns[] = {panel.left, panel.right};
        multiply_in_registers<Format, R, 2, AHEAD>(x, row_stride, word_stride, columns, panel.stride, words, sums);
    } else {
        for (int64_t k = 0; k < words; k += WORDS_IN_CACHE) {
            const int64_t offset = k * panel.stride;
            const Columns part{(const char*)panel.left + offset, (const char*)panel.right + offset, panel.stride};
            multiply_by_halves<Format, R, AHEAD>(x + k * word_stride, row_stride, word_stride, part,
                                                 std::min(WORDS_IN_CACHE, words - k), sums);
        }
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
