// y = x Wᵀ + b, with W in panels of 32 output columns, each [words][32] words along the input.
#include "buffer.h"
#include "kernels.h"
#include "tiles.h"

namespace {

constexpr int AHEAD = 512;  // bytes

// Words of a tile's rows side by side, so that the inner loop reads them in order.
void interleave(const uint32_t* x, int64_t row_stride, int64_t rows, int64_t words, uint32_t* tile) {
    for (int64_t k = 0; k < words; k++)
        for (int64_t r = 0; r < rows; r++) *tile++ = x[r * row_stride + k];
}

template <class Out>
f32x16 bias_at(const LinearCall& call, int64_t column, int64_t count) {
    if (!call.bias) return f32x16{};
    const Out* bias = (const Out*)call.bias + column;
    return load_most(bias, count);
}

template <class Out>
f32x16 finish(const LinearCall& call, f32x16 sum, int64_t, int64_t column, int64_t count) {
    return sum + bias_at<Out>(call, column, count);
}

// x was shifted by 128 to be unsigned; zero_sum is 128 · Σ w for each column.
template <class Out>
f32x16 finish(const LinearCall& call, i32x16 sum, int64_t row, int64_t column, int64_t count) {
    i32x16 shift;
    memcpy(&shift, call.zero_sum + column, sizeof shift);
    f32x16 exact = __builtin_convertvector(sum - shift, f32x16);
    return exact * (load(call.weight_scale + column) * call.x_scale[row]) + bias_at<Out>(call, column, count);
}

// Rows [row, row + rows) of panel p.
template <class Format, class Out>
inline void put_rows(const LinearCall& call, const typename Format::Sum (*sums)[2], int64_t row, int64_t rows, int64_t p) {
    for (int64_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const int64_t column = p * PANEL + half * LANES, count = call.out - column;
            if (count <= 0) continue;
            Out* y = (Out*)call.y + (row + r) * call.out + column;
            const f32x16 values = finish<Out>(call, sums[r][half], row + r, column, count);
            count >= LANES ? store(y, values) : store_some(y, values, count);
        }
}

template <class Format, class Out>
void linear(const LinearCall& call) {
    const int64_t words = call.in / Format::PER_WORD, stride = call.x_stride / Format::PER_WORD;
    const int64_t panels = (call.out + PANEL - 1) / PANEL;
    const uint32_t* x = (const uint32_t*)call.x;
    const bool in_place = call.rows <= 2;  // few rows are read in order as they lie
    static thread_local Buffer<uint32_t> tiles;
    if (!in_place) {
        tiles.of(call.rows * words);
        for (int64_t row = 0; row < call.rows; row += MAX_ROWS)
            interleave(x + row * stride, stride, std::min<int64_t>(MAX_ROWS, call.rows - row), words,
                       tiles.data() + row * words);
    }
    const uint32_t* packed = tiles.data();
    // Few rows: each thread reads a stretch of memory. Many: a thread that shares its core with another process does less.
    const int64_t share = in_place ? (panels + threads() - 1) / threads() : 1;
#pragma omp parallel for schedule(dynamic, share) if (threads() > 1) num_threads(threads())
    for (int64_t p = 0; p < panels; p++) {
        const u32x16* weight = (const u32x16*)call.weight + p * words * 2;
        const Columns panel{weight, weight + 1, 2 * sizeof(u32x16)};
        for (int64_t row = 0; row < call.rows; row += MAX_ROWS)
            with_rows(std::min<int64_t>(MAX_ROWS, call.rows - row), [&]<int R>() {
                typename Format::Sum sums[R][2] = {};
                if (in_place)
                    multiply<Format, R, AHEAD>(x + row * stride, stride, 1, panel, words, sums);
                else
                    multiply<Format, R, AHEAD>(packed + row * words, 1, R, panel, words, sums);
                put_rows<Format, Out>(call, sums, row, R, p);
            });
    }
}

#if defined(KVRELAY_TILES)
// Worth it from so many rows on; fewer wait for memory, and the vector units keep up with that.
constexpr int64_t MIN_TILE_ROWS = 8;

template <class Format, class Out>
bool linear_by_tiles(const LinearCall& call) {
    const int64_t words = call.in / Format::PER_WORD, stride = call.x_stride / Format::PER_WORD;
    if (call.rows < MIN_TILE_ROWS || words % TILE || !tiles_allowed()) return false;
    const int64_t panels = (call.out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic) if (threads() > 1) num_threads(threads())
    for (int64_t p = 0; p < panels; p++)
        for (int64_t row = 0; row < call.rows; row += MAX_TILE_ROWS) {
            const int64_t rows = std::min(MAX_TILE_ROWS, call.rows - row);
            typename Format::Sum sums[MAX_TILE_ROWS][2];
            multiply_by_tiles<Format>((const uint32_t*)call.x + row * stride, stride, rows,
                                      (const u32x16*)call.weight + p * words * 2, words, sums);
            put_rows<Format, Out>(call, sums, row, rows, p);
        }
    return true;
}
#else
template <class Format, class Out>
bool linear_by_tiles(const LinearCall&) { return false; }
#endif

}  // namespace

extern "C" void kvrelay_linear(const LinearCall* call) {
    const bool narrow = call->y_dtype == BFLOAT16;
    if (call->weight_dtype == FLOAT32) linear<Float32, float>(*call);
    if (call->weight_dtype == BFLOAT16 && !linear_by_tiles<BFloat16, uint16_t>(*call))
        linear<BFloat16, uint16_t>(*call);
    if (call->weight_dtype == INT8 && narrow && !linear_by_tiles<Int8, uint16_t>(*call)) linear<Int8, uint16_t>(*call);
    if (call->weight_dtype == INT8 && !narrow && !linear_by_tiles<Int8, float>(*call)) linear<Int8, float>(*call);
}
