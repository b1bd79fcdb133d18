// Stores new keys and values in the block layout of panels.h, and rotates queries for int4 keys.
#include <cmath>

#include "panels.h"
#include "rotation.h"

namespace {

// Rounds values to -largest..largest times a scale. The scale is rounded to bfloat16 first, so the
// stored scale is the one that was used.
struct Quantized {
    float largest;
    uint16_t scale;

    template <class T>
    Quantized(const T* values, int64_t count, float largest) : largest(largest) {
        scale = to_bfloat16(largest_magnitude(values, count) / largest);
        if (to_float(scale) == 0) scale = to_bfloat16(1);
    }

    int8_t operator()(float value) const {
        return (int8_t)std::min(largest, std::max(-largest, std::nearbyint(value / to_float(scale))));
    }
};

// Writes the values of a token to the block of a head, in the layout of panels.h.
template <class To, class Convert>
void scatter(const StoreCall& call, int64_t per_word, int64_t token, To* block, Convert value) {
    if (call.side == KEYS) {
        const int64_t group = group_of(call.block_size);
        block += token / group * group * call.dim + token % group * per_word;
        for (int64_t i = 0; i < call.dim; i++) block[i / per_word * group * per_word + i % per_word] = value(i);
    } else {
        for (int64_t column = 0; column < call.dim; column += PANEL) {
            const int64_t width = std::min<int64_t>(PANEL, call.dim - column);
            To* word = block + column * call.block_size + token / per_word * width * per_word + token % per_word;
            for (int64_t i = 0; i < width; i++) word[i * per_word] = value(column + i);
        }
    }
}

// Copies a vector as float32, until the next call of the thread.
template <class T>
float* as_floats(const T* from, int64_t dim) {
    static thread_local Buffer<float> memory;
    float* values = memory.of(dim);
    for (int64_t i = 0; i < dim; i++) values[i] = to_float(from[i]);
    return values;
}

// Writes a vector as int4. Returns its scale.
template <class T>
uint16_t store_int4(const StoreCall& call, const T* from, int64_t token, uint8_t* block) {
    float* values = as_floats(from, call.dim);
    if (call.side == KEYS) rotate(values, call.dim);
    const Quantized quantized(values, call.dim, 7);
    const int64_t group = group_of(call.block_size);
    for (int64_t column = 0; column < call.dim; column += PANEL) {
        const int64_t half = std::min<int64_t>(PANEL, call.dim - column) / 2;
        // The first byte, and bytes from one to the next.
        const bool keys = call.side == KEYS;
        const int64_t stride = keys ? group : 1;
        uint8_t* to = keys ? block + token / group * group * call.dim / 2 + token % group + column / 2 * group
                           : block + column * call.block_size / 2 + token * half;
        for (int64_t i = 0; i < half; i++)
            to[i * stride] = (uint8_t)(quantized(values[column + i]) + 8 | quantized(values[column + half + i]) + 8 << 4);
    }
    return quantized.scale;
}

template <class T>
void store_token(const StoreCall& call, const T* from, int64_t block, int64_t head, int64_t token) {
    constexpr int64_t per_word = 4 / sizeof(T);
    const int64_t index = (block * call.heads + head) * call.block_size;
    if (call.to_dtype == INT4) {
        call.scale[index + token] = store_int4(call, from, token, (uint8_t*)call.to + index * call.dim / 2);
    } else if (call.to_dtype == INT8) {
        const Quantized quantized(from, call.dim, 127);
        call.scale[index + token] = quantized.scale;
        scatter(call, per_word, token, (int8_t*)call.to + index * call.dim,
                [&](int64_t i) { return quantized(to_float(from[i])); });
    } else {
        scatter(call, per_word, token, (T*)call.to + index * call.dim, [&](int64_t i) { return from[i]; });
    }
}

template <class T>
void store_new(const StoreCall& call) {
    const Batch& batch = *call.batch;
#pragma omp parallel for collapse(2) schedule(static) if (threads() > 1) num_threads(threads())
    for (int64_t p = 0; p < batch.num_parts; p++)
        for (int64_t head = 0; head < call.heads; head++) {
            const Part& part = batch.parts[p];
            for (int64_t i = 0; i < part.rows; i++) {
                const int64_t position = part.past + i;
                store_token(call, (const T*)call.x + (part.row + i) * call.token_stride + head * call.head_stride,
                            batch.tables[part.table + position / call.block_size], head, position % call.block_size);
            }
        }
}

template <class T>
void rotate_all(const RotateCall& call) {
#pragma omp parallel for collapse(2) schedule(static) if (threads() > 1) num_threads(threads())
    for (int64_t row = 0; row < call.rows; row++)
        for (int64_t head = 0; head < call.heads; head++) {
            float* values = as_floats((const T*)call.x + row * call.token_stride + head * call.head_stride, call.dim);
            T* to = (T*)call.y + (row * call.heads + head) * call.dim;
            rotate(values, call.dim);
            for (int64_t i = 0; i < call.dim; i++) put(to + i, values[i]);
        }
}

}  // namespace

extern "C" void kvrelay_rotate(const RotateCall* call) {
    call->dtype == BFLOAT16 ? rotate_all<uint16_t>(*call) : rotate_all<float>(*call);
}

extern "C" void kvrelay_store(const StoreCall* call) {
    call->x_dtype == BFLOAT16 ? store_new<uint16_t>(*call) : store_new<float>(*call);
}
