// Operations on each row of a matrix: RMS norm and quantisation.
#include <cmath>

#include "kernels.h"
#include "vectors.h"

namespace {

template <class T>
void rms_norm(const RmsNormCall& call, int64_t first, int64_t last) {
    const T* weight = (const T*)call.weight;
    const int64_t whole = call.columns / LANES * LANES, rest = call.columns - whole;
    for (int64_t row = first; row < last; row++) {
        const T* x = (const T*)call.x + row * call.x_stride;
        T* y = (T*)call.y + row * call.columns;
        f32x16 squares{};
        for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
        if (rest) squares += load_some(x + whole, rest) * load_some(x + whole, rest);
        const float inverse = 1.0f / std::sqrt(sum_of(squares) / call.columns + (float)call.epsilon);
        const auto scaled = [&](f32x16 values, f32x16 factors) {
            values *= inverse;
            if (call.round_before) values = rounded<T>(values);
            return values * (factors + (float)call.weight_offset);
        };
        for (int64_t i = 0; i < whole; i += LANES) store(y + i, scaled(load(x + i), load(weight + i)));
        if (rest) store_some(y + whole, scaled(load_some(x + whole, rest), load_some(weight + whole, rest)), rest);
    }
}

template <class T>
void quantize(const QuantizeCall& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        const T* x = (const T*)call.x + row * call.x_stride;
        uint8_t* y = call.y + row * call.columns;
        const float largest = largest_magnitude(x, call.columns);
        call.scale[row] = largest / 127;
        const float inverse = largest > 0 ? 127 / largest : 0;
        for (int64_t i = 0; i < call.columns; i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, call.columns - i);
            // Adding 1.5 · 2^23 rounds to the nearest integer, which is then in the low bits.
            const f32x16 shifted = load_most(x + i, count) * inverse + 12582912.0f;
            uint8_t values[LANES];
            write_as(values, (u32x16)shifted + 128);
            count == LANES ? memcpy(y + i, values, LANES) : memcpy(y + i, values, count);
        }
    }
}

}  // namespace

extern "C" void kvrelay_rms_norm(const RmsNormCall* call, int64_t first, int64_t last) {
    call->dtype == BFLOAT16 ? rms_norm<uint16_t>(*call, first, last) : rms_norm<float>(*call, first, last);
}

extern "C" void kvrelay_quantize(const QuantizeCall* call, int64_t first, int64_t last) {
    call->x_dtype == BFLOAT16 ? quantize<uint16_t>(*call, first, last) : quantize<float>(*call, first, last);
}
