// V of 32 keys as the transposition of their K, for layers whose V is the first values of K.
#pragma once

#include "product.h"

// Transposes a square of N rows of N lanes: for each bit of a place, exchanges the lanes that have the
// bit in a row that has it not with those that have it not in a row that has it (Eklundh, 1972).
template <int bit = 1, class V, int N>
inline __attribute__((always_inline)) void transpose(V (&rows)[N]) {
    [&]<int... lane>(std::integer_sequence<int, lane...>) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            if (i & bit) continue;
            const V a = rows[i], b = rows[i | bit];
            rows[i] = __builtin_shufflevector(a, b, (lane & bit ? N + lane - bit : lane)...);
            rows[i | bit] = __builtin_shufflevector(a, b, (lane & bit ? N + lane : lane + bit)...);
        }
    }(std::make_integer_sequence<int, N>{});
    if constexpr (2 * bit < N) transpose<2 * bit>(rows);
}

// The register of a processor that holds words, and the same bits as squares of rows have them: one word, or
// two of bfloat16.
template <class Format>
using TransposedRow = typename Native<std::conditional_t<Format::PER_WORD == 1, uint32_t, uint64_t>,
                                      NATIVE_LANES / Format::PER_WORD>::type;

// Transposes rows of words of K, each of NATIVE_LANES keys, to rows of words of V, each of NATIVE_LANES columns.
template <class Format, int N>
inline __attribute__((always_inline)) void k_to_v(TransposedRow<Format> (&rows)[N]) {
    if constexpr (Format::PER_WORD == 2) {
        // Two words of K have two values of two keys each. Their words of V have a value of both keys each.
        typedef typename Native<uint16_t, 2 * NATIVE_LANES>::type Halves;
        [&]<int... i>(std::integer_sequence<int, i...>) {
            for (auto& row : rows) {
                const Halves halves = (Halves)row;
                row = (TransposedRow<Format>)__builtin_shufflevector(halves, halves, (i % 4 % 3 ? i ^ 3 : i)...);
            }
        }(std::make_integer_sequence<int, 2 * NATIVE_LANES>{});
    }
    transpose(rows);
}

// Writes `columns` columns of V of 32 keys as panels of 32 columns, each [32 / values per word][32] words, from K
// [k_words] of these keys. Columns beyond K are zero.
template <class Format>
void write_v(const Columns& k, int64_t k_words, int64_t columns, uint32_t* v) {
    constexpr int N = NATIVE_LANES / Format::PER_WORD;
    using Row = TransposedRow<Format>;
    for (int64_t column = 0; column < columns; column += NATIVE_LANES) {
        const int64_t word = column / Format::PER_WORD;
        uint32_t* to = v + column / PANEL * (PANEL / Format::PER_WORD * PANEL) + column % PANEL;
        for (int64_t key = 0; key < PANEL; key += NATIVE_LANES) {
            const char* from = (const char*)(key < LANES ? k.left : k.right) + word * k.stride + key % LANES * sizeof(uint32_t);
            Row rows[N] = {};
            if (word + N <= k_words) {
#pragma GCC unroll 16
                for (int i = 0; i < N; i++) memcpy(&rows[i], from + i * k.stride, sizeof(Row));
            } else {
                for (int64_t i = 0; i < k_words - word; i++) memcpy(&rows[i], from + i * k.stride, sizeof(Row));
            }
            k_to_v<Format>(rows);
#pragma GCC unroll 16
            for (int i = 0; i < N; i++) memcpy(to + (key / Format::PER_WORD + i) * PANEL, &rows[i], sizeof(Row));
        }
    }
}
