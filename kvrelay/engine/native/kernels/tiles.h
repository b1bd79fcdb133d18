// The product of up to 32 rows and a panel by a matrix unit (Intel AMX), which reads panels as they are.
//
// Eight tiles of 16 rows of 64 bytes: 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 the panel's two halves. With
// KVRELAY_EMULATE_TILES they are plain memory, so that what is computed with them can be tested on any processor.
#pragma once

#include "product.h"

#if defined(KVRELAY_EMULATE_TILES)
#define KVRELAY_TILES 1
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define KVRELAY_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(KVRELAY_TILES)

constexpr int TILE = 16;  // rows, and words in a row
constexpr int64_t MAX_TILE_ROWS = 2 * TILE;

#if defined(KVRELAY_EMULATE_TILES)

inline thread_local uint32_t tile_memory[8][TILE][TILE];
inline thread_local int64_t tile_rows[8];

inline bool tiles_allowed() { return true; }

inline void tile_configure(int64_t upper, int64_t lower) {
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int t = 0; t < 8; t++) tile_rows[t] = rows[t];
}

inline void tile_release() {}

inline void tile_zero(int t) { memset(tile_memory[t], 0, sizeof tile_memory[t]); }

inline void tile_load(int t, const void* from, int64_t stride) {
    for (int64_t r = 0; r < tile_rows[t]; r++) memcpy(tile_memory[t][r], (const char*)from + r * stride, 64);
}

inline void tile_store(int t, void* to, int64_t stride) {
    for (int64_t r = 0; r < tile_rows[t]; r++) memcpy((char*)to + r * stride, tile_memory[t][r], 64);
}

template <class Format>
void emulated_product(int sum, int x, int panel) {
    for (int64_t r = 0; r < tile_rows[sum]; r++) {
        typename Format::Sum sums;
        memcpy(&sums, tile_memory[sum][r], sizeof sums);
        for (int k = 0; k < TILE; k++) {
            u32x16 words;
            memcpy(&words, tile_memory[panel][k], sizeof words);
            sums = Format::add_product(sums, words, tile_memory[x][r][k]);
        }
        memcpy(tile_memory[sum][r], &sums, sizeof sums);
    }
}

#define tile_product(Format, sum, x, panel) emulated_product<Format>(sum, x, panel)

#else

// Linux gives the tiles' state only to a process that asks.
inline bool tiles_allowed() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

inline void tile_configure(int64_t upper, int64_t lower) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = rows[t] ? 64 : 0, config.rows[t] = (uint8_t)rows[t];
    asm volatile("" ::: "memory");  // the instruction reads all of it, which the compiler is not told
    _tile_loadconfig(&config);
}

inline void tile_release() { _tile_release(); }

// Tiles are named by literal numbers in the instructions.
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_product(Format, sum, x, panel)   \
    if constexpr (Format::PER_WORD == 2)      \
        _tile_dpbf16ps(sum, x, panel);        \
    else                                      \
        _tile_dpbusd(sum, x, panel)

#endif

// sums[r] = x[r] · panel for `rows` ≤ 32 rows of x, `row_stride` words apart; `words` is a multiple of 16.
template <class Format>
void multiply_by_tiles(const uint32_t* x, int64_t row_stride, int64_t rows, const u32x16* panel, int64_t words,
                       typename Format::Sum (*sums)[2]) {
    const int64_t upper = std::min<int64_t>(TILE, rows), lower = rows - upper;
    constexpr int64_t stride = 2 * sizeof(u32x16);
    tile_configure(upper, lower);
    tile_zero(0);
    tile_zero(1);
    if (lower) {  // a tile without rows may not be named
        tile_zero(2);
        tile_zero(3);
    }
    for (int64_t k = 0; k < words; k += TILE) {
        tile_load(6, panel + 2 * k, stride);
        tile_load(7, panel + 2 * k + 1, stride);
        tile_load(4, x + k, row_stride * sizeof(uint32_t));
        tile_product(Format, 0, 4, 6);
        tile_product(Format, 1, 4, 7);
        if (!lower) continue;
        tile_load(5, x + TILE * row_stride + k, row_stride * sizeof(uint32_t));
        tile_product(Format, 2, 5, 6);
        tile_product(Format, 3, 5, 7);
    }
    tile_store(0, sums, stride);
    tile_store(1, &sums[0][1], stride);
    if (lower) {
        tile_store(2, sums + TILE, stride);
        tile_store(3, &sums[TILE][1], stride);
    }
    tile_release();
}

#endif
