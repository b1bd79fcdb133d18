// Products with a matrix unit (Intel AMX), which reads panels in place.
//
// There are eight tiles of 16 rows of 64 bytes. Tiles 0 to 3 hold sums of 32 rows and 32 columns,
// tiles 4 and 5 hold rows of x, and tiles 6 and 7 hold the two halves of the panel. With
// KVRELAY_EMULATE_TILES, tiles are plain memory, so the code can be tested on any processor.
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

// Rows of a tile, and words in a row.
constexpr int TILE = 16;
constexpr int64_t TILE_WORDS = TILE * TILE;
// Rows that are multiplied at a time.
constexpr int64_t TILE_ROWS = 2 * TILE;

#if defined(KVRELAY_EMULATE_TILES)

inline thread_local uint32_t tile_memory[8][TILE][TILE];

inline bool tiles_allowed() { return true; }
inline void tile_configure() {}
inline void tile_release() {}

inline void tile_zero(int t) { memset(tile_memory[t], 0, sizeof tile_memory[t]); }

inline void tile_load(int t, const void* from, int64_t stride) {
    for (int64_t r = 0; r < TILE; r++) memcpy(tile_memory[t][r], (const char*)from + r * stride, 64);
}

inline void tile_store(int t, void* to, int64_t stride) {
    for (int64_t r = 0; r < TILE; r++) memcpy((char*)to + r * stride, tile_memory[t][r], 64);
}

template <class Format>
void emulated_product(int sum, int x, int panel) {
    for (int64_t r = 0; r < TILE; r++) {
        typename Format::Sum sums;
        memcpy(&sums, tile_memory[sum][r], sizeof sums);
        for (int k = 0; k < TILE; k++) {
            u32x16 words;
            memcpy(&words, tile_memory[panel][k], sizeof words);
            sums = add_product<Format>(sums, words, Format::operand(tile_memory[x][r][k]), Parts<Format>{});
        }
        memcpy(tile_memory[sum][r], &sums, sizeof sums);
    }
}

#define tile_load_once tile_load
#define tile_product(Format, sum, x, panel) emulated_product<Format>(sum, x, panel)

#else

// Linux grants the tile state to a process on request.
inline bool tiles_allowed() {
    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

inline void tile_configure() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = TILE;
    // The compiler does not know that the instruction reads the whole structure.
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
}

inline void tile_release() { _tile_release(); }

// The instructions take tile numbers as literals. tile_load_once does not evict other data from the
// cache.
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_load_once(t, from, stride) _tile_stream_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_product(Format, sum, x, panel)   \
    if constexpr (Format::PER_WORD == 2)      \
        _tile_dpbf16ps(sum, x, panel);        \
    else                                      \
        _tile_dpbusd(sum, x, panel)

#endif

// Reserves the tiles for this thread during its lifetime.
struct Tiles {
    Tiles() { tile_configure(); }
    ~Tiles() { tile_release(); }
    Tiles(const Tiles&) = delete;
};

// Copies up to 32 rows of words to the layout of tiles: for every 16 words, the upper 16 rows, then
// the lower 16 rows. Missing rows stay undefined, and their results are not used.
inline void to_tiles(const uint32_t* x, int64_t row_stride, int64_t rows, int64_t words, uint32_t* tiles) {
    for (int64_t k = 0; k < words; k += TILE, tiles += 2 * TILE_WORDS)
        for (int64_t r = 0; r < rows; r++) memcpy(tiles + r * TILE, x + r * row_stride + k, 64);
}

// The sums of 32 rows and 32 columns. The functions skip the lower 16 rows unless `lower` is set.

inline void zero_sums(bool lower) {
    tile_zero(0);
    tile_zero(1);
    if (!lower) return;
    tile_zero(2);
    tile_zero(3);
}

// sums: [rows][2] vectors, with `stride` bytes from one row to the next.
inline void load_sums(bool lower, const void* sums, int64_t stride) {
    tile_load(0, sums, stride);
    tile_load(1, (const char*)sums + 64, stride);
    if (!lower) return;
    const char* rest = (const char*)sums + TILE * stride;
    tile_load(2, rest, stride);
    tile_load(3, rest + 64, stride);
}

inline void store_sums(bool lower, void* sums, int64_t stride) {
    tile_store(0, sums, stride);
    tile_store(1, (char*)sums + 64, stride);
    if (!lower) return;
    char* rest = (char*)sums + TILE * stride;
    tile_store(2, rest, stride);
    tile_store(3, rest + 64, stride);
}

// sums += x · panel over 16 words, with x in the layout of `to_tiles`. The order of the additions
// is always the same.
template <class Format>
inline __attribute__((always_inline)) void add_products(bool lower, const uint32_t* x, Columns panel) {
    tile_load(6, panel.left, panel.stride);
    tile_load(7, panel.right, panel.stride);
    tile_load_once(4, x, 64);
    tile_product(Format, 0, 4, 6);
    tile_product(Format, 1, 4, 7);
    if (!lower) return;
    tile_load_once(5, x + TILE_WORDS, 64);
    tile_product(Format, 2, 5, 6);
    tile_product(Format, 3, 5, 7);
}

#endif
