// Attention of new tokens over paged KV, with a softmax that goes over 32 keys at a time (FlashAttention, Dao 2022).
//
// Rows are the query heads of the new tokens that share one KV head; they are taken twelve at a time against panels of
// 32 keys that begin at multiples of 32 in the sequence. A row's sums are made in the same order whatever else is in
// the batch and however the prompt was cut into chunks, so its result is the same to the bit.
#include <cmath>
#include <vector>

#include "panels.h"

namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr float NEVER = -1e30f;  // score of a key that a query does not see; finite, so that differences stay numbers

// Up to twelve rows of one KV head, and what the softmax has of them so far.
template <class Format, int R>
class Tile {
    using Value = typename Format::Value;

  public:
    Tile(const AttendCall& call, const Part& part, int64_t head, int64_t first_row, uint32_t* queries, f32x16* out,
         int64_t v_columns)
        : call(call), queries(queries), out(out), sharpness((call.softcap > 0 ? 1.0 : call.scale) * LOG2_E) {
        for (int r = 0; r < R; r++) {
            const int64_t token = (first_row + r) / call.group;
            query_head[r] = head * call.group + (first_row + r) % call.group;
            row[r] = part.row + token;
            position[r] = part.past + token;
            most[r] = call.sinks ? call.sinks[query_head[r]] * LOG2_E / sharpness : NEVER;
            total[r] = f32x16{};
            if (call.sinks) total[r][0] = 1;
            const uint32_t* query = (const uint32_t*)((const Value*)call.q + row[r] * call.q_token_stride +
                                                      query_head[r] * call.q_head_stride);
            for (int64_t k = 0; k < call.k_dim / Format::PER_WORD; k++) queries[k * R + r] = query[k];
        }
        std::fill_n(out, R * v_columns / LANES, f32x16{});
    }

    // Keys that some row sees: [first panel's, last].
    int64_t first_key() const {
        return call.window ? std::max<int64_t>(0, position[0] - call.window + 1) / PANEL * PANEL : 0;
    }
    int64_t last_key() const { return position[R - 1]; }

    void attend(const Panel<Format>& panel, int64_t first_key, int64_t v_columns) {
        constexpr int64_t HALF = Panels<Format>::HALF;
        const int64_t k_words = call.k_dim / Format::PER_WORD;
        f32x16 scores[R][2] = {};
        multiply<Format, R>(queries, 1, R, panel.k, k_words, scores);
        alignas(64) Value weights[R][PANEL];
        const f32x16 shrink = weigh(scores, first_key, panel, weights);
        for (int64_t c = 0; c < v_columns / PANEL; c++) {
            // Summed by themselves first: of two products in a sum, which one the compiler fuses would depend on R.
            f32x16(*kept)[2] = (f32x16(*)[2])(out + c * 2 * R);
            f32x16 sums[R][2] = {};
            for (int half = 0; half < 2; half++) {
                const uint32_t* v = panel.v[half] + c * panel.v_stride;
                multiply<Format, R>((const uint32_t*)weights + half * HALF, 2 * HALF, 1,
                                    Columns{v, v + LANES, PANEL * sizeof(uint32_t)}, HALF, sums);
            }
            for (int r = 0; r < R; r++)
                for (int half = 0; half < 2; half++) kept[r][half] = kept[r][half] * shrink[r] + sums[r][half];
        }
    }

    void finish() const {
        for (int r = 0; r < R; r++) {
            Value* y = (Value*)call.y + (row[r] * call.kv_heads * call.group + query_head[r]) * call.v_dim;
            const float inverse = 1.0f / sum_of(total[r]);
            for (int64_t column = 0; column < call.v_dim; column += LANES) {
                const f32x16 values = out[column / PANEL * 2 * R + 2 * r + column / LANES % 2] * inverse;
                const int64_t count = call.v_dim - column;
                count >= LANES ? store(y + column, values) : store_some(y + column, values, count);
            }
        }
    }

  private:
    const AttendCall& call;
    uint32_t* queries;  // [k_words][R] words
    f32x16* out;        // [v_columns / 32][R][2], before the division by the total
    const float sharpness;  // weights are 2^(sharpness · (score − largest score))
    int64_t query_head[R], row[R], position[R];
    float most[R];
    f32x16 total[R];

    // Scores become weights relative to each row's largest score so far. Returns the factor for what went before.
    f32x16 weigh(f32x16 (&scores)[R][2], int64_t first_key, const Panel<Format>& panel, Value (&weights)[R][PANEL]) {
        const bool scaled = call.kv_dtype == INT8;
        bool hidden[R][2];
        f32x16 change{};
        for (int r = 0; r < R; r++) {
            for (int half = 0; half < 2; half++) {
                if (scaled) scores[r][half] *= panel.k_scale[half];
                if (call.softcap > 0) cap(scores[r][half]);
                hidden[r][half] = hide(r, scores[r][half], first_key + half * LANES);
            }
            const float largest = std::max(most[r], max_of(maximum(scores[r][0], scores[r][1])));
            change[r] = (most[r] - largest) * sharpness;
            most[r] = largest;
        }
        const f32x16 shrink = power_of_two(change);
        for (int r = 0; r < R; r++) {
            total[r] *= shrink[r];
            for (int half = 0; half < 2; half++) {
                f32x16 weight = power_of_two(scores[r][half] * sharpness - most[r] * sharpness);
                if (hidden[r][half]) weight = scores[r][half] == NEVER ? f32x16{} : weight;
                total[r] += weight;
                if (scaled) weight *= panel.v_scale[half];
                store(weights[r] + half * LANES, weight);
            }
        }
        return shrink;
    }

    void cap(f32x16& scores) const {
        const float limit = call.softcap;
        for (int i = 0; i < LANES; i++) scores[i] = limit * std::tanh(scores[i] * (float)call.scale / limit);
    }

    // Returns whether there was any to hide.
    bool hide(int r, f32x16& scores, int64_t first_key) const {
        const int64_t newest = position[r], oldest = call.window ? newest - call.window + 1 : 0;
        if (first_key >= oldest && first_key + LANES - 1 <= newest) return false;
        for (int64_t i = 0; i < LANES; i++)
            if (first_key + i < oldest || first_key + i > newest) scores[i] = NEVER;
        return true;
    }
};

// Memory for the tiles of all KV heads.
template <class Format>
struct Scratch {
    Panels<Format> panels;
    Buffer<uint32_t> queries;
    Buffer<float> out;
};

// So few rows that they are one tile, as in decoding: what counts is that KV is read once and in order. So all heads
// meet their keys of a panel, which lie side by side, before the next panel.
template <class Format, int R>
void attend_few(const AttendCall& call, const Part& part, int64_t first_head, int64_t heads, Scratch<Format>& scratch) {
    Panels<Format>& panels = scratch.panels;
    panels.open(call, part);
    auto* queries = scratch.queries.of(heads * R * panels.k_words);
    auto* out = (f32x16*)scratch.out.of(heads * R * panels.v_columns);
    std::vector<Tile<Format, R>> tiles;
    tiles.reserve(heads);
    for (int64_t h = 0; h < heads; h++)
        tiles.emplace_back(call, part, first_head + h, 0, queries + h * R * panels.k_words,
                           out + h * R * panels.v_columns / LANES, panels.v_columns);
    for (int64_t key = tiles[0].first_key(); key <= tiles[0].last_key(); key += PANEL)
        for (int64_t h = 0; h < heads; h++)
            tiles[h].attend(panels.at(key, first_head + h), key, panels.v_columns);
    for (const auto& tile : tiles) tile.finish();
}

// Many rows, as in prefill: all tiles of a head go over its keys while they are in the cache.
template <class Format>
void attend_many(const AttendCall& call, const Part& part, int64_t head, Scratch<Format>& scratch) {
    Panels<Format>& panels = scratch.panels;
    panels.open(call, part);
    const int64_t rows = part.rows * call.group;
    auto* queries = scratch.queries.of(MAX_ROWS * panels.k_words);
    auto* out = (f32x16*)scratch.out.of(MAX_ROWS * panels.v_columns);
    for (int64_t row = 0; row < rows; row += MAX_ROWS)
        with_rows(std::min<int64_t>(MAX_ROWS, rows - row), [&]<int R>() {
            Tile<Format, R> tile(call, part, head, row, queries, out, panels.v_columns);
            for (int64_t key = tile.first_key(); key <= tile.last_key(); key += PANEL)
                tile.attend(panels.at(key, head), key, panels.v_columns);
            tile.finish();
        });
}

template <class Format>
void attend(const AttendCall& call) {
    const Batch& batch = *call.batch;
    const int64_t shares = std::min<int64_t>(threads(), call.kv_heads);  // of the heads of a sequence
#pragma omp parallel for collapse(2) schedule(dynamic) if (threads() > 1) num_threads(threads())
    for (int64_t p = 0; p < batch.num_parts; p++)
        for (int64_t share = 0; share < shares; share++) {
            static thread_local Scratch<Format> scratch;
            const Part& part = batch.parts[p];
            const int64_t first = call.kv_heads * share / shares, last = call.kv_heads * (share + 1) / shares;
            if (part.rows * call.group <= MAX_ROWS)
                with_rows(part.rows * call.group,
                          [&]<int R>() { attend_few<Format, R>(call, part, first, last - first, scratch); });
            else
                for (int64_t head = first; head < last; head++) attend_many<Format>(call, part, head, scratch);
        }
}

}  // namespace

extern "C" void kvrelay_attend(const AttendCall* call) {
    call->dtype == BFLOAT16 ? attend<BFloat16>(*call) : attend<Float32>(*call);
}
