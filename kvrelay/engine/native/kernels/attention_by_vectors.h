// Attention of up to twelve rows with vectors, 32 keys at a time.
#pragma once

#include "attention_rows.h"

// 2^x, at the precision of the numbers that weights are rounded to.
template <class Format>
inline f32x16 weight_of(f32x16 exponent) {
    if constexpr (sizeof(typename Format::Value) == 2) return rough_power_of_two(exponent);
    return power_of_two(exponent);
}

template <class Format, int R>
class VectorRows : public AttentionRows<Format, R> {
    using Base = AttentionRows<Format, R>;
    using Value = typename Format::Value;
    using Base::call, Base::most, Base::out, Base::sharpness, Base::total;

  public:
    using Operand = typename Format::Operand;
    static constexpr int MOST = R, KEYS = PANEL;
    // Words of an operand.
    static constexpr int QUERY_WORDS = sizeof(Operand) / sizeof(uint32_t);

    VectorRows(const AttendCall& call, const Part& part, int64_t head, int64_t first_row, int64_t count,
               uint32_t* queries, f32x16* out, int64_t v_columns)
        : Base(call, part, head, first_row, count, out, v_columns), queries((Operand*)queries) {
        for (int r = 0; r < R; r++)
            for (int64_t k = 0; k < call.k_dim / Format::PER_WORD; k++)
                this->queries[k * R + r] = Format::operand(this->query(r)[k]);
    }

    void attend(Panels<Format>& panels, const Round& round, const Round& next) {
        Panel<Format> panel;
        panels.find(round.first_key, round.head, panel);
        if (call.k_scale) panels.prefetch(next);
        attend(panels, panel, round.first_key);
    }

    // Attends to those of KEPT adjacent panels that any row sees.
    void attend_kept(const Panels<Format>& panels, const Panel<Format>* panel, int64_t first_key) {
        const int64_t last = std::min(this->last_key(), first_key + (Panels<Format>::KEPT - 1) * PANEL);
        for (int64_t key = std::max(first_key, this->template first_key<PANEL>()); key <= last; key += PANEL)
            attend(panels, panel[(key - first_key) / PANEL], key);
    }

  private:
    // [k_words][R].
    Operand* queries;

    void attend(const Panels<Format>& panels, const Panel<Format>& panel, int64_t first_key) {
        constexpr int64_t HALF = Panels<Format>::HALF;
        f32x16 scores[R][2] = {};
        multiply<Format, R>(queries, 1, R, panel.k, panels.k_words, scores);
        alignas(64) Value weights[R][PANEL];
        const f32x16 shrink = weigh(scores, first_key, panel, weights);
        Operand prepared[WORDS_ARE_OPERANDS<Format> ? 1 : 2 * HALF * R];
        const Operand* factors = (const Operand*)weights;
        if constexpr (!WORDS_ARE_OPERANDS<Format>) {
            for (int k = 0; k < 2 * HALF * R; k++) prepared[k] = Format::operand(((const uint32_t*)weights)[k]);
            factors = prepared;
        }
        for (int64_t c = 0; c < panels.v_columns / PANEL; c++) {
            // The products are summed separately first. In a sum of two products, the compiler may
            // fuse either product, and its choice would depend on R.
            f32x16(*kept)[2] = (f32x16(*)[2])(out + c * 2 * R);
            f32x16 sums[R][2] = {};
            for (int half = 0; half < 2; half++) {
                const uint32_t* v = panel.v[half] + c * panel.v_stride;
                multiply<Format, R>(factors + half * HALF, 2 * HALF, 1,
                                    Columns{v, v + LANES, PANEL * sizeof(uint32_t)}, HALF, sums);
            }
            for (int r = 0; r < R; r++)
                for (int half = 0; half < 2; half++) kept[r][half] = kept[r][half] * shrink[r] + sums[r][half];
        }
    }

    // Converts scores to weights relative to the largest score of each row so far. Returns the
    // factors by which the earlier sums shrink.
    f32x16 weigh(f32x16 (&scores)[R][2], int64_t first_key, const Panel<Format>& panel, Value (&weights)[R][PANEL]) {
        const bool scaled = call.k_scale != nullptr;
        bool hidden[R][2];
        f32x16 change{};
        for (int r = 0; r < R; r++) {
            for (int half = 0; half < 2; half++) {
                const int64_t key = first_key + half * LANES;
                if (scaled) scores[r][half] *= panel.k_scale[half];
                if (call.softcap > 0) this->cap(scores[r][half]);
                hidden[r][half] = !this->sees_all(r, key, LANES);
                if (hidden[r][half]) scores[r][half] = this->hide(r, scores[r][half], key);
            }
            const float largest = std::max(most[r], max_of(maximum(scores[r][0], scores[r][1])));
            change[r] = (most[r] - largest) * sharpness;
            most[r] = largest;
        }
        const f32x16 shrink = power_of_two(change);
        for (int r = 0; r < R; r++) {
            total[r] *= shrink[r];
            for (int half = 0; half < 2; half++) {
                // At most 0 but for rounding, which for huge scores is larger than any exponent.
                const f32x16 exponent = scores[r][half] * sharpness - most[r] * sharpness;
                f32x16 weight = weight_of<Format>(minimum(splat(0.0f), exponent));
                if (hidden[r][half]) weight = select(scores[r][half] == NEVER, f32x16{}, weight);
                total[r] += weight;
                if (scaled) weight *= panel.v_scale[half];
                store(weights[r] + half * LANES, weight);
            }
        }
        return shrink;
    }
};
