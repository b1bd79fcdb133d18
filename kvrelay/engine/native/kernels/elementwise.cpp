// Elementwise operations with broadcasting, computed in float32 and rounded to the type of the
// result.
#include "kernels.h"
#include "vectors.h"

namespace {

template <int64_t operation>
inline f32x16 apply(f32x16 a, f32x16 b) {
    if constexpr (operation == NEGATE) return -a;
    if constexpr (operation == ADD) return a + b;
    if constexpr (operation == MULTIPLY) return a * b;
    if constexpr (operation == SILU) return a / (exponential(-a) + 1.0f);
    return a;
}

// The start of a row of the innermost dimension, and the stride of its values.
template <class T>
struct Row {
    T* at;
    int64_t stride;

    f32x16 read(int64_t i, int64_t count) const {
        if (stride == 0) return splat(to_float(at[0]));
        if (stride == 1) return load_most(at + i, count);
        f32x16 values{};
        for (int64_t lane = 0; lane < std::min<int64_t>(count, LANES); lane++)
            values[lane] = to_float(at[(i + lane) * stride]);
        return values;
    }

    void write(int64_t i, f32x16 values, int64_t count) const {
        if (stride == 1 && count >= LANES) return store(at + i, values);
        for (int64_t lane = 0; lane < std::min<int64_t>(count, LANES); lane++)
            put(&at[(i + lane) * stride], values[lane]);
    }
};

template <int64_t operation, class A, class B, class Y>
void run(const ElementwiseCall& c) {
    constexpr bool binary = operation == ADD || operation == MULTIPLY;
    const int64_t outer = c.size[0] * c.size[1] * c.size[2];
#pragma omp parallel for schedule(static) if (threads() > 1 && outer * c.size[3] > 65536) num_threads(threads())
    for (int64_t index = 0; index < outer; index++) {
        const int64_t i2 = index % c.size[2], i1 = index / c.size[2] % c.size[1], i0 = index / c.size[2] / c.size[1];
        const auto start = [&](const int64_t* stride) { return i0 * stride[0] + i1 * stride[1] + i2 * stride[2]; };
        const Row<const A> a{(const A*)c.a + start(c.a_stride), c.a_stride[3]};
        const Row<const B> b{binary ? (const B*)c.b + start(c.b_stride) : nullptr, c.b_stride[3]};
        const Row<Y> y{(Y*)c.y + start(c.y_stride), c.y_stride[3]};
        for (int64_t i = 0; i < c.size[3]; i += LANES) {
            const int64_t count = c.size[3] - i;
            f32x16 other{};
            if constexpr (binary) other = b.read(i, count);
            y.write(i, apply<operation>(a.read(i, count), other), count);
        }
    }
}

template <int64_t operation, class A, class B>
void to_result(const ElementwiseCall& c) {
    c.y_dtype == BFLOAT16 ? run<operation, A, B, uint16_t>(c) : run<operation, A, B, float>(c);
}

template <int64_t operation>
void with_types(const ElementwiseCall& c) {
    const bool a_narrow = c.a_dtype == BFLOAT16, b_narrow = c.b_dtype == BFLOAT16;
    if (a_narrow) return b_narrow ? to_result<operation, uint16_t, uint16_t>(c) : to_result<operation, uint16_t, float>(c);
    b_narrow ? to_result<operation, float, uint16_t>(c) : to_result<operation, float, float>(c);
}

}  // namespace

extern "C" void kvrelay_elementwise(const ElementwiseCall* call) {
    switch (call->operation) {
        case COPY: return with_types<COPY>(*call);
        case NEGATE: return with_types<NEGATE>(*call);
        case ADD: return with_types<ADD>(*call);
        case MULTIPLY: return with_types<MULTIPLY>(*call);
        case SILU: return with_types<SILU>(*call);
    }
}
