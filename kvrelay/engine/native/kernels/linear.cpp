// y = x Wᵀ + b, with W in panels of 32 output columns, each [words][32] words along the input. A gated
// layer is y = silu(x Wᵀ + b) · x Vᵀ (SwiGLU, Shazeer 2020), and each panel of W is followed by one of V.
#include "buffer.h"
#include "kernels.h"
#include "tiles.h"

namespace {

// Distance of the prefetch in bytes.
constexpr int AHEAD = 512;

// Interleaves the operands of the rows, so that the inner loop reads them in order.
template <class Format>
void interleave(const uint32_t* x, int64_t row_stride, int64_t rows, int64_t words, typename Format::Operand* tile) {
    for (int64_t k = 0; k < words; k++)
        for (int64_t r = 0; r < rows; r++) *tile++ = Format::operand(x[r * row_stride + k]);
}

inline f32x16 scaled(const LinearCall&, f32x16 sum, int64_t, int64_t) { return sum; }

// x is shifted by 128 to be unsigned. zero_sum is 128 · Σ w for each column.
inline f32x16 scaled(const LinearCall& call, i32x16 sum, int64_t row, int64_t column) {
    f32x16 exact = to_floats(sum - read_as<i32x16>(call.zero_sum + column));
    return exact * (load(call.weight_scale + column) * call.x_scale[row]);
}

// Writes rows [row, row + rows) of 32 output columns. `sums` belongs to panel p of the weight. In a
// gated layer the next panel has the factors, and `factors` are its sums.
template <class Format, class Out>
void put_rows(const LinearCall& call, const typename Format::Sum (*sums)[2], const typename Format::Sum (*factors)[2],
              int64_t row, int64_t rows, int64_t p) {
    const int64_t first = p / (call.gated ? 2 : 1) * PANEL;
    for (int64_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const int64_t column = first + half * LANES, count = call.out - column, packed = p * PANEL + half * LANES;
            if (count <= 0) continue;
            f32x16 values = scaled(call, sums[r][half], row + r, packed);
            if (call.bias) values += load_most((const Out*)call.bias + column, count);
            // Rounded where separate kernels round.
            if (call.gated)
                values = rounded<Out>(silu(rounded<Out>(values))) *
                         rounded<Out>(scaled(call, factors[r][half], row + r, packed + PANEL));
            Out* y = (Out*)call.y + (row + r) * call.out + column;
            count >= LANES ? store(y, values) : store_some(y, values, count);
        }
}

template <class Format, class Out>
void linear(const LinearCall& call) {
    const int64_t words = call.in / Format::PER_WORD, stride = call.x_stride / Format::PER_WORD;
    const int64_t together = call.gated ? 2 : 1, panels = (call.out + PANEL - 1) / PANEL * together;
    const uint32_t* x = (const uint32_t*)call.x;
    // Few rows are read in order without interleaving.
    const bool few = call.rows <= 2, in_place = few && WORDS_ARE_OPERANDS<Format>;
    using Operand = typename Format::Operand;
    static thread_local Buffer<Operand> tiles;
    if (!in_place) {
        tiles.of(call.rows * words);
        for (int64_t row = 0; row < call.rows; row += MAX_ROWS)
            interleave<Format>(x + row * stride, stride, std::min<int64_t>(MAX_ROWS, call.rows - row), words,
                       tiles.data() + row * words);
    }
    const Operand* packed = tiles.data();
    // With few rows, each thread reads a contiguous range of memory. With many rows, the schedule
    // is dynamic, so a thread that shares its core with another process does less work.
    const int64_t share = few ? (panels / together + threads() - 1) / threads() : 1;
#pragma omp parallel for schedule(dynamic, share) if (threads() > 1) num_threads(threads())
    for (int64_t p = 0; p < panels; p += together)
        for (int64_t row = 0; row < call.rows; row += MAX_ROWS)
            with_rows(std::min<int64_t>(MAX_ROWS, call.rows - row), [&]<int R>() {
                typename Format::Sum sums[2][R][2] = {};
                for (int64_t i = 0; i < together; i++) {
                    const u32x16* weight = (const u32x16*)call.weight + (p + i) * words * 2;
                    const Columns panel{weight, weight + 1, 2 * sizeof(u32x16)};
                    if (in_place)
                        multiply<Format, R, AHEAD>((const Operand*)x + row * stride, stride, 1, panel, words, sums[i]);
                    else
                        multiply<Format, R, AHEAD>(packed + row * words, 1, R, panel, words, sums[i]);
                }
                put_rows<Format, Out>(call, sums[0], sums[1], row, R, p);
            });
}

#if defined(KVRELAY_TILES)
// Cache blocking for one core: rows stay in the second-level cache, and a part of a panel stays in
// the first-level cache while all these rows use it. Blocking only affects the speed: intermediate
// sums keep their full precision.
constexpr int64_t WORDS_OF_ROWS = 256 * 1024, WORDS_OF_PANEL = 256;

// Prefetches cache lines from `next` on, `share` lines at each call.
struct Fetch {
    const char* next;
    int64_t lines, share;

    void some() {
        for (int64_t i = 0; i < share && lines > 0; i++, lines--, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// Multiplies rows whose tiles fit into the second-level cache. `tiles` is ordered by ranges of
// `step` words, then by groups of 32 rows.
template <class Format>
void multiply_panel(const uint32_t* tiles, int64_t rows, const u32x16* panel, int64_t words, int64_t step, bool another,
                    typename Format::Sum (*sums)[2]) {
    constexpr int64_t stride = 2 * sizeof(u32x16);
    const int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t first = 0; first < words; first += step) {
        const int64_t count = std::min(step, words - first), after = first + count;
        const int64_t ahead = after < words ? std::min(step, words - after) : another ? std::min(step, words) : 0;
        const int64_t calls = groups * count / TILE;
        Fetch fetch{(const char*)(panel + 2 * after), 2 * ahead, (2 * ahead + calls - 1) / calls};
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const bool lower = rows - row > TILE;
            first ? load_sums(lower, sums + row, stride) : zero_sums(lower);
            for (int64_t k = first; k < after; k += TILE, tiles += 2 * TILE_WORDS) {
                fetch.some();
                add_products<Format>(lower, tiles, {panel + 2 * k, panel + 2 * k + 1, stride});
            }
            store_sums(lower, sums + row, stride);
        }
    }
}

template <class Format, class Out>
bool linear_by_tiles(const LinearCall& call) {
    const int64_t words = call.in / Format::PER_WORD, stride = call.x_stride / Format::PER_WORD;
    if (words % TILE || !tiles_allowed()) return false;
    const int64_t together = call.gated ? 2 : 1, panels = (call.out + PANEL - 1) / PANEL * together;
    const int64_t most = std::max(TILE_ROWS, WORDS_OF_ROWS / words / TILE_ROWS * TILE_ROWS);
    const int64_t turns = (call.rows + most - 1) / most;
    static thread_local Buffer<uint32_t> packed;
    for (int64_t turn = 0; turn < turns; turn++) {
        const int64_t groups = (call.rows + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t begin = groups * turn / turns * TILE_ROWS;
        const int64_t rows = std::min(call.rows, groups * (turn + 1) / turns * TILE_ROWS) - begin;
        uint32_t* tiles = packed.of(round_up(rows, TILE_ROWS) * words);
        const int64_t step = rows <= TILE_ROWS ? words : WORDS_OF_PANEL;
        const int64_t share = rows <= TILE_ROWS ? (panels / together + threads() - 1) / threads() : 1;
#pragma omp parallel if (threads() > 1) num_threads(threads())
        {
            Tiles held;
            static thread_local Buffer<typename Format::Sum[2]> kept;
            const int64_t apart = round_up(rows, TILE_ROWS);
            auto* sums = kept.of(together * apart);
#pragma omp for collapse(2)
            for (int64_t k = 0; k < words; k += step)
                for (int64_t row = 0; row < rows; row += TILE_ROWS) {
                    const int64_t count = std::min(step, words - k);
                    to_tiles((const uint32_t*)call.x + (begin + row) * stride + k, stride,
                             std::min(TILE_ROWS, rows - row), count,
                             tiles + k * round_up(rows, TILE_ROWS) + row * count);
                }
#pragma omp for schedule(dynamic, share)
            for (int64_t p = 0; p < panels; p += together) {
                for (int64_t i = 0; i < together; i++)
                    multiply_panel<Format>(tiles, rows, (const u32x16*)call.weight + (p + i) * words * 2, words, step,
                                           p + i + 1 < panels, sums + i * apart);
                put_rows<Format, Out>(call, sums, sums + apart, begin, rows, p);
            }
        }
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
