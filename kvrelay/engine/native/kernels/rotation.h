// The rotation of int4 keys and of the queries that meet them: products with a Hadamard matrix.
#pragma once

#include <cmath>
#include <cstdint>

// Values that are rotated together: the largest power of two that divides `dim`.
inline int64_t rotated_size(int64_t dim) { return dim & -dim; }

// Multiplies each part of `size` values, a power of two, by the normalised Hadamard matrix, which is
// its own inverse. The order of additions is that of `rotate` in quantised_kv.py.
inline void rotate(float* values, int64_t dim, int64_t size) {
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

inline void rotate(float* values, int64_t dim) { rotate(values, dim, rotated_size(dim)); }
