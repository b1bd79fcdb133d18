// Attention of new tokens over paged KV. The softmax is computed over some keys at a time
// (FlashAttention, Dao 2022).
//
// A row is a query head of a new token. Rows that share one KV head are computed together, as many
// at a time as the implementation has room for. The order of additions in a row depends neither on
// the rest of the batch nor on the chunks of the prompt, so the result is the same to the bit.
#include <vector>

#include "attention_by_tiles.h"
#include "attention_by_vectors.h"

namespace {

// Scratch memory for the rows of all KV heads.
template <class Format>
struct Scratch {
    Panels<Format> panels;
    Buffer<uint32_t> queries;
    Buffer<float> out;
};

// All heads process a round of adjacent keys before the next round. With few rows, as in decoding,
// the speed depends on reading the KV once and in order.
template <class Rows, class Format>
void attend_heads(const AttendCall& call, const Part& part, int64_t first_head, int64_t heads, int64_t first_row,
                  int64_t count, Scratch<Format>& scratch) {
    Panels<Format>& panels = scratch.panels;
    const int64_t query_words = Rows::MOST * panels.k_words * Rows::QUERY_WORDS, out_values = Rows::MOST * panels.v_columns;
    uint32_t* queries = scratch.queries.of(heads * query_words);
    float* out = scratch.out.of(heads * out_values);
    std::vector<Rows> rows;
    rows.reserve(heads);
    for (int64_t h = 0; h < heads; h++)
        rows.emplace_back(call, part, first_head + h, first_row, count, queries + h * query_words,
                          (f32x16*)(out + h * out_values), panels.v_columns);
    for (int64_t key = rows[0].template first_key<Rows::KEYS>(); key <= rows[0].last_key(); key += Rows::KEYS)
        for (int64_t h = 0; h < heads; h++) {
            const Round next = h + 1 < heads ? Round{first_head + h + 1, key} : Round{first_head, key + Rows::KEYS};
            rows[h].attend(panels, {first_head + h, key}, next);
        }
    for (auto& one : rows) one.finish();
}

// Rows that attend in turn at most. Their queries and sums stay in the second-level cache.
constexpr int64_t MOST_IN_TURN = 192;

// For V that is in K: groups of `size` rows of one head process a round of adjacent keys before the
// next round, so that V is made from K once for all of them.
template <class Rows, class Format>
void attend_in_turn(int64_t size, const AttendCall& call, const Part& part, int64_t head, int64_t first_row,
                    int64_t count, Scratch<Format>& scratch) {
    constexpr int64_t KEYS = Panels<Format>::KEPT * PANEL;
    Panels<Format>& panels = scratch.panels;
    const int64_t groups = (count + size - 1) / size;
    const int64_t query_words = Rows::MOST * panels.k_words * Rows::QUERY_WORDS;
    const int64_t out_values = Rows::MOST * panels.v_columns;
    uint32_t* queries = scratch.queries.of(groups * query_words);
    float* out = scratch.out.of(groups * out_values);
    std::vector<Rows> rows;
    rows.reserve(groups);
    for (int64_t g = 0; g < groups; g++)
        rows.emplace_back(call, part, head, first_row + g * size, std::min(size, count - g * size),
                          queries + g * query_words, (f32x16*)(out + g * out_values), panels.v_columns);
    for (int64_t key = rows[0].template first_key<KEYS>(); key <= rows.back().last_key(); key += KEYS) {
        Panel<Format> panel[Panels<Format>::KEPT];
        const int64_t last = std::min(rows.back().last_key(), key + KEYS - 1);
        for (int64_t first = key; first <= last; first += PANEL)
            panels.find(first, head, panel[(first - key) / PANEL]);
        panels.touch({head, key + KEYS});
        for (auto& one : rows) one.attend_kept(panels, panel, key);
    }
    for (auto& one : rows) one.finish();
}

template <class F>
struct ByVectors {
    using Format = F;
    static constexpr int64_t MOST = MAX_ROWS;
    static constexpr bool WHOLE_PANELS = false;

    template <class... Arguments>
    void operator()(int64_t count, Arguments&&... arguments) const {
        with_rows(count, [&]<int R>() { attend_heads<VectorRows<Format, R>>(arguments...); });
    }

    // All groups are computed as if they were of the same size: the last may be smaller.
    template <class... Arguments>
    void in_turn(int64_t count, Arguments&&... arguments) const {
        const int64_t groups = (count + MOST - 1) / MOST, size = (count + groups - 1) / groups;
        with_rows(size, [&]<int R>() { attend_in_turn<VectorRows<Format, R>>(size, arguments...); });
    }
};

#if defined(KVRELAY_TILES)
template <class F>
struct ByTiles {
    using Format = F;
    static constexpr int64_t MOST = TILE_ROWS;
    static constexpr bool WHOLE_PANELS = true;
    Tiles held;

    template <class... Arguments>
    void operator()(int64_t, Arguments&&... arguments) const {
        attend_heads<TileRows<Format>>(arguments...);
    }

    template <class... Arguments>
    void in_turn(int64_t, Arguments&&... arguments) const {
        attend_in_turn<TileRows<Format>>(MOST, arguments...);
    }
};
#endif

template <class Way>
void attend(const AttendCall& call) {
    using Format = typename Way::Format;
    const Batch& batch = *call.batch;
    // The heads of a sequence are divided into this many shares.
    const int64_t shares = std::min<int64_t>(threads(), call.kv_heads);
#pragma omp parallel for collapse(2) schedule(dynamic) if (threads() > 1) num_threads(threads())
    for (int64_t p = 0; p < batch.num_parts; p++)
        for (int64_t share = 0; share < shares; share++) {
            static thread_local Scratch<Format> scratch;
            const Way way;
            const Part& part = batch.parts[p];
            const int64_t first = call.kv_heads * share / shares, last = call.kv_heads * (share + 1) / shares;
            const int64_t rows = part.rows * call.group, heads = rows <= Way::MOST ? last - first : 1;
            scratch.panels.open(call, part, Way::WHOLE_PANELS);
            if (v_in_k(call)) {
                for (int64_t head = first; head < last; head++)
                    for (int64_t row = 0; row < rows; row += MOST_IN_TURN) {
                        const int64_t count = std::min(MOST_IN_TURN, rows - row);
                        way.in_turn(count, call, part, head, row, count, scratch);
                    }
                continue;
            }
            // All rows of a head process its keys while the keys are in the cache.
            for (int64_t head = first; head < last; head += heads)
                for (int64_t row = 0; row < rows; row += Way::MOST) {
                    const int64_t count = std::min(Way::MOST, rows - row);
                    way(count, call, part, head, heads, row, count, scratch);
                }
        }
}

bool attend_by_tiles(const AttendCall& call) {
#if defined(KVRELAY_TILES)
    if (call.dtype == BFLOAT16 && call.k_dim / BFloat16::PER_WORD % TILE == 0 && tiles_allowed()) {
        attend<ByTiles<BFloat16>>(call);
        return true;
    }
#endif
    return false;
}

}  // namespace

extern "C" void kvrelay_attend(const AttendCall* call) {
    if (attend_by_tiles(*call)) return;
    call->dtype == BFLOAT16 ? attend<ByVectors<BFloat16>>(*call) : attend<ByVectors<Float32>>(*call);
}
