// V of 32 keys as their transposed K, for layers whose V is the first values of K.
#pragma once

#include "product.h"

// Reads a square of N rows of N lanes and exchanges its upper right with its lower left quarter, the
// first step of a transposition. The quarters come from memory so that no register is shuffled.
template <class T, int N>
inline __attribute__((always_inline)) void load_quarters(const char* from, int64_t stride,
                                                         typename Native<T, N>::type (&rows)[N]) {
    typedef typename Native<T, N / 2>::type Half;
    [&]<int... lane>(std::integer_sequence<int, lane...>) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            const char* at = from + i % (N / 2) * stride + i / (N / 2) * sizeof(Half);
            const char* below = at + N / 2 * stride;
#if defined(__AVX512F__)
            // GCC would load both and shuffle them.
            const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)at));
            rows[i] = (decltype(+rows[i]))_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)below), 1);
#else
            Half low, high;
            memcpy(&low, at, sizeof low);
            memcpy(&high, below, sizeof high);
            rows[i] = __builtin_shufflevector(low, high, lane...);
#endif
        }
    }(std::make_integer_sequence<int, N>{});
}

// The other steps: for each lower bit, each row without the bit gives its lanes with the bit to the
// row with it, and takes the lanes without the bit from that row (Eklundh, 1972).
template <int bit = 1, class V, int N>
inline __attribute__((always_inline)) void transpose_quarters(V (&rows)[N]) {
    if constexpr (2 * bit < N) {
        [&]<int... lane>(std::integer_sequence<int, lane...>) {
#pragma GCC unroll 16
            for (int i = 0; i < N; i++) {
                if (i & bit) continue;
                const V a = rows[i], b = rows[i | bit];
                rows[i] = __builtin_shufflevector(a, b, (lane & bit ? N + lane - bit : lane)...);
                rows[i | bit] = __builtin_shufflevector(a, b, (lane & bit ? N + lane : lane + bit)...);
            }
        }(std::make_integer_sequence<int, N>{});
        transpose_quarters<2 * bit>(rows);
    }
}

// Two words of bfloat16 K have two values of each of two keys. Their words of V have one value of both
// keys. Exchanges the second value of the first key with the first value of the second key.
template <class V>
inline V exchange_values(V row) {
    constexpr int values = sizeof(V) / 2;
    typedef typename Native<uint16_t, values>::type Values;
    return [&]<int... i>(std::integer_sequence<int, i...>) {
        return (V)__builtin_shufflevector((Values)row, (Values)row, (i % 4 % 3 ? i ^ 3 : i)...);
    }(std::make_integer_sequence<int, values>{});
}

// Writes `columns` columns of V of 32 keys, as panels of 32 columns, each [32 / values per word][32]
// words. k: the panel of the keys, [k_words]. Columns beyond K are zero.
template <class Format>
void write_v(const Columns& k, int64_t k_words, int64_t columns, uint32_t* v) {
    // A register of words has NATIVE_LANES keys of K, or as many columns of V. With bfloat16, a lane of
    // the transposition has two words.
    constexpr int N = NATIVE_LANES / Format::PER_WORD;
    using Lane = std::conditional_t<Format::PER_WORD == 1, uint32_t, uint64_t>;
    using Row = typename Native<Lane, N>::type;
    for (int64_t column = 0; column < columns; column += NATIVE_LANES) {
        const int64_t word = column / Format::PER_WORD;
        uint32_t* to = v + column / PANEL * (PANEL / Format::PER_WORD * PANEL) + column % PANEL;
        for (int64_t key = 0; key < PANEL; key += NATIVE_LANES) {
            const char* half = (const char*)(key < LANES ? k.left : k.right);
            const char* from = half + word * k.stride + key % LANES * sizeof(uint32_t);
            int64_t stride = k.stride;
            Row last[N];
            if (word + N > k_words) {
                std::fill_n(last, N, Row{});
                for (int64_t i = 0; i < k_words - word; i++) memcpy(last + i, from + i * stride, sizeof(Row));
                from = (const char*)last;
                stride = sizeof(Row);
            }
            Row rows[N];
            load_quarters<Lane, N>(from, stride, rows);
            if constexpr (Format::PER_WORD == 2)
                for (auto& row : rows) row = exchange_values(row);
            transpose_quarters(rows);
#pragma GCC unroll 16
            for (int i = 0; i < N; i++) memcpy(to + (key / Format::PER_WORD + i) * PANEL, &rows[i], sizeof(Row));
        }
    }
}
