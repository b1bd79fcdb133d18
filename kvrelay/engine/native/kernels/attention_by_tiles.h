// Attention of up to 32 rows with a matrix unit, 128 keys at a time.
#pragma once

#include "attention_rows.h"
#include "tiles.h"

#if defined(KVRELAY_TILES)

template <class Format>
class TileRows : public AttentionRows<Format, TILE_ROWS> {
    using Base = AttentionRows<Format, TILE_ROWS>;
    using Value = typename Format::Value;
    using Base::call, Base::count, Base::most, Base::out, Base::sharpness, Base::total;
    static constexpr int PANELS = Panels<Format>::KEPT, VECTORS = 2 * PANELS;
    static_assert(Format::PER_WORD == 2, "a tile of weights has 32 keys in a row");

  public:
    static constexpr int MOST = TILE_ROWS, KEYS = PANELS * PANEL, QUERY_WORDS = 1;

    TileRows(const AttendCall& call, const Part& part, int64_t head, int64_t first_row, int64_t count,
             uint32_t* queries, f32x16* out, int64_t v_columns)
        : Base(call, part, head, first_row, count, out, v_columns), queries(queries) {
        for (int64_t r = 0; r < count; r++)
            for (int64_t k = 0; k < call.k_dim / Format::PER_WORD; k += TILE)
                memcpy(queries + k * TILE_ROWS + r * TILE, this->query(r) + k, 64);
    }

    void attend(Panels<Format>& panels, const Round& round, const Round& next) {
        Panel<Format> panel[PANELS];
        for (int64_t p = 0; p < there(round.first_key); p++)
            panels.find(round.first_key + p * PANEL, round.head, panel[p]);
        // Memory would be idle while the weights are computed.
        attend(panels, panel, round.first_key, [&] { panels.touch(next); });
    }

    // Attends to those of KEPT adjacent panels that any row sees.
    void attend_kept(const Panels<Format>& panels, const Panel<Format>* panel, int64_t first_key) {
        if (first_key <= this->last_key() && first_key >= this->template first_key<KEYS>())
            attend(panels, panel, first_key, [] {});
    }

  private:
    // In the layout of `to_tiles`.
    uint32_t* queries;

    // Panels of a round that any row sees.
    int64_t there(int64_t first_key) const {
        return std::min<int64_t>(PANELS, (this->last_key() - first_key) / PANEL + 1);
    }

    // between: is called before the weights are computed.
    template <class Between>
    void attend(const Panels<Format>& panels, const Panel<Format>* panel, int64_t first_key, Between between) {
        const bool lower = count > TILE;
        const int64_t there = this->there(first_key);
        alignas(64) f32x16 scores[TILE_ROWS][VECTORS];
        alignas(64) uint32_t weights[PANELS][2 * TILE_WORDS];
        for (int64_t p = 0; p < there; p++) {
            const Columns k = panel[p].k;
            zero_sums(lower);
            for (int64_t word = 0; word < panels.k_words; word += TILE)
                add_products<Format>(lower, queries + word * TILE_ROWS,
                                     {(const char*)k.left + word * k.stride, (const char*)k.right + word * k.stride,
                                      k.stride});
            store_sums(lower, &scores[0][2 * p], sizeof scores[0]);
        }
        between();
        for (int64_t r = 0; r < count; r++) weigh(r, scores[r], first_key, panel, weights, panels.v_columns);
        for (int64_t c = 0; c < panels.v_columns / PANEL; c++) {
            f32x16* sums = out + c * 2 * TILE_ROWS;
            load_sums(lower, sums, 2 * sizeof(f32x16));
            for (int64_t p = 0; p < there; p++) {
                const uint32_t* v = panel[p].v[0] + c * panel[p].v_stride;
                add_products<Format>(lower, weights[p], {v, v + LANES, PANEL * sizeof(uint32_t)});
            }
            store_sums(lower, sums, 2 * sizeof(f32x16));
        }
    }

    // Converts the scores of a row to weights relative to the largest score so far, and rescales
    // the sums of the row.
    void weigh(int64_t r, f32x16 (&scores)[VECTORS], int64_t first_key, const Panel<Format>* panel,
               uint32_t (*weights)[2 * TILE_WORDS], int64_t v_columns) {
        const bool scaled = call.k_scale != nullptr, hidden = !this->sees_all(r, first_key, KEYS);
        if (scaled)
            for (int i = 0; i < VECTORS; i++) scores[i] *= panel[i / 2].k_scale[i % 2];
        if (call.softcap > 0)
            for (int i = 0; i < VECTORS; i++) this->cap(scores[i]);
        if (hidden)
            for (int i = 0; i < VECTORS; i++) scores[i] = this->hide(r, scores[i], first_key + i * LANES);
        f32x16 largest = scores[0];
        for (int i = 1; i < VECTORS; i++) largest = maximum(largest, scores[i]);
        const float now = std::max(most[r], max_of(largest));
        if (now != most[r]) {
            const float shrink = power_of_two(splat((most[r] - now) * sharpness))[0];
            most[r] = now;
            total[r] *= shrink;
            for (int64_t c = 0; c < v_columns / PANEL; c++)
                for (int half = 0; half < 2; half++) out[c * 2 * TILE_ROWS + 2 * r + half] *= shrink;
        }
        const float factor = sharpness, offset = now * sharpness;
        f32x16 sum{};
        for (int i = 0; i < VECTORS; i++) {
            // At most 0 but for rounding, which for huge scores is larger than any exponent.
            f32x16 weight = rough_power_of_two(minimum(splat(0.0f), scores[i] * factor - offset));
            if (hidden) weight = select(scores[i] == NEVER, f32x16{}, weight);
            sum += weight;
            if (scaled) weight *= panel[i / 2].v_scale[i % 2];
            store((Value*)(weights[i / 2] + r * TILE + i % 2 * TILE / 2), weight);
        }
        total[r] += sum;
    }
};

#endif
