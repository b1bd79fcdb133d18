// Rows of attention that are computed together: query heads of new tokens that share one KV head.
#pragma once

#include <cmath>

#include "panels.h"

constexpr float LOG2_E = 1.44269504f;
// Score of a key that a query does not see. Finite, so that differences of scores are numbers.
constexpr float NEVER = -1e30f;

// At most MOST rows of one KV head, and the state of their softmax.
template <class Format, int MOST>
class AttentionRows {
  public:
    using Value = typename Format::Value;

    // The first and the last key that any row sees. The first key is rounded down to a multiple of
    // KEYS in the sequence.
    template <int KEYS>
    int64_t first_key() const {
        return call.window ? std::max<int64_t>(0, position[0] - call.window + 1) / KEYS * KEYS : 0;
    }
    int64_t last_key() const { return position[count - 1]; }

    void finish() {
        for (int64_t r = 0; r < count; r++) {
            if (rotates_back(call)) rotate_sums(r);
            Value* y = (Value*)call.y + (row[r] * call.kv_heads * call.group + query_head[r]) * call.v_dim;
            const float inverse = 1.0f / sum_of(total[r]);
            for (int64_t column = 0; column < call.v_dim; column += LANES) {
                const f32x16 values = sums(r, column) * inverse;
                const int64_t rest = call.v_dim - column;
                rest >= LANES ? store(y + column, values) : store_some(y + column, values, rest);
            }
        }
    }

  protected:
    const AttendCall& call;
    const int64_t count;
    // [v_columns / 32][MOST][2], before the division by the total.
    f32x16* out;
    // Weights are 2^(sharpness · (score − largest score)).
    const float sharpness;
    int64_t query_head[MOST], row[MOST], position[MOST];
    float most[MOST];
    f32x16 total[MOST];

    AttentionRows(const AttendCall& call, const Part& part, int64_t head, int64_t first_row, int64_t count, f32x16* out,
                  int64_t v_columns)
        : call(call), count(count), out(out), sharpness((call.softcap > 0 ? 1.0 : call.scale) * LOG2_E) {
        // Rows beyond `count` repeat the last one.
        for (int64_t r = 0; r < MOST; r++) {
            const int64_t number = first_row + std::min(r, count - 1), token = number / call.group;
            query_head[r] = head * call.group + number % call.group;
            row[r] = part.row + token;
            position[r] = part.past + token;
            most[r] = call.sinks ? call.sinks[query_head[r]] * LOG2_E / sharpness : NEVER;
            total[r] = f32x16{};
            if (call.sinks) total[r][0] = 1;
        }
        std::fill_n(out, MOST * v_columns / LANES, f32x16{});
    }

    // The sums of a row from a column on, a multiple of 16.
    f32x16& sums(int64_t r, int64_t column) const { return out[column / PANEL * 2 * MOST + 2 * r + column / LANES % 2]; }

    void rotate_sums(int64_t r) const {
        static thread_local Buffer<float> memory;
        const int64_t columns = summed_columns(call);
        float* values = memory.of(round_up(columns, LANES));
        for (int64_t column = 0; column < columns; column += LANES) store(values + column, sums(r, column));
        rotate(values, columns, rotated_size(call.k_dim));
        for (int64_t column = 0; column < columns; column += LANES) sums(r, column) = load(values + column);
    }

    const uint32_t* query(int64_t r) const {
        return (const uint32_t*)((const Value*)call.q + row[r] * call.q_token_stride +
                                 query_head[r] * call.q_head_stride);
    }

    void cap(f32x16& scores) const {
        const float limit = call.softcap;
        for (int i = 0; i < LANES; i++) scores[i] = limit * std::tanh(scores[i] * (float)call.scale / limit);
    }

    int64_t oldest(int64_t r) const { return call.window ? position[r] - call.window + 1 : 0; }

    bool sees_all(int64_t r, int64_t first_key, int64_t keys) const {
        return first_key >= oldest(r) && first_key + keys - 1 <= position[r];
    }

    f32x16 hide(int64_t r, f32x16 scores, int64_t first_key) const {
        i32x16 lanes;
        for (int i = 0; i < LANES; i++) lanes[i] = i;
        // Positions count from this key and are clamped to the vector, so they fit into 32 bits.
        const int32_t from = (int32_t)std::max<int64_t>(oldest(r) - first_key, 0);
        const int32_t to = (int32_t)std::clamp<int64_t>(position[r] - first_key, -1, LANES);
        return select((lanes >= from) & (lanes <= to), scores, splat(NEVER));
    }
};
