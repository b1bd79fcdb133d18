// The rotation of int4 keys and of the queries that meet them: products with a Hadamard matrix.
#pragma once

#include <cmath>
#include <cstdint>

// Multiplies a vector by the normalised Hadamard matrix, which is its own inverse. If `dim` is not a
// power of two, each part of as many values as the largest one that divides `dim`. The order of
// additions is that of `rotate` in quantised_kv.py.
inline void rotate(float* values, int64_t dim) {
    const int64_t size = dim & -dim;
    for (int64_t half = 1; half < size; half *= 2)
        for (float* pair = values; pair < values + dim; pair += 2 * half)
            for (int64_t i = 0; i < half; i++) {
                const float a = pair[i], b = pair[half + i];
                pair[i] = a + b;
                pair[half + i] = a - b;
            }
    const float factor = (float)(1 / std::sqrt((double)size));
    for (int64_t i = 0; i < dim; i++) values[i] *= factor;
}
