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
    if constexpr (operation == SILU) return silu(a);
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

// The indices of a row. Counting is faster than dividing, which a short row would notice.
struct RowIndex {
    const int64_t* size;
    int64_t at[3];

    RowIndex(const int64_t* size, int64_t row)
        : size(size), at{row / (size[2] * size[1]), row / size[2] % size[1], row % size[2]} {}

    void next() {
        for (int i = 2; i >= 0 && ++at[i] == size[i]; i--) at[i] = 0;
    }

    int64_t offset(const int64_t* stride) const { return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2]; }
};

template <int64_t operation, class A, class B, class Y>
void run(const ElementwiseCall& c, int64_t first, int64_t last) {
    constexpr bool binary = operation == ADD || operation == MULTIPLY;
    RowIndex index(c.size, first);
    for (int64_t row = first; row < last; row++, index.next()) {
        const Row<const A> a{(const A*)c.a + index.offset(c.a_stride), c.a_stride[3]};
        const Row<const B> b{binary ? (const B*)c.b + index.offset(c.b_stride) : nullptr, c.b_stride[3]};
        const Row<Y> y{(Y*)c.y + index.offset(c.y_stride), c.y_stride[3]};
        for (int64_t i = 0; i < c.size[3]; i += LANES) {
            const int64_t count = c.size[3] - i;
            f32x16 other{};
            if constexpr (binary) other = b.read(i, count);
            y.write(i, apply<operation>(a.read(i, count), other), count);
        }
    }
}

template <int64_t operation, class A, class B>
void to_result(const ElementwiseCall& c, int64_t first, int64_t last) {
    c.y_dtype == BFLOAT16 ? run<operation, A, B, uint16_t>(c, first, last) : run<operation, A, B, float>(c, first, last);
}

template <int64_t operation, class A>
void with_b(const ElementwiseCall& c, int64_t first, int64_t last) {
    c.b_dtype == BFLOAT16 ? to_result<operation, A, uint16_t>(c, first, last)
                          : to_result<operation, A, float>(c, first, last);
}

template <int64_t operation>
void with_types(const ElementwiseCall& c, int64_t first, int64_t last) {
    c.a_dtype == BFLOAT16 ? with_b<operation, uint16_t>(c, first, last) : with_b<operation, float>(c, first, last);
}

}  // namespace

extern "C" void kvrelay_elementwise(const ElementwiseCall* call, int64_t first, int64_t last) {
    switch (call->operation) {
        case COPY: return with_types<COPY>(*call, first, last);
        case NEGATE: return with_types<NEGATE>(*call, first, last);
        case ADD: return with_types<ADD>(*call, first, last);
        case MULTIPLY: return with_types<MULTIPLY>(*call, first, last);
        case SILU: return with_types<SILU>(*call, first, last);
    }
}
