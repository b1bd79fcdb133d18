// What each kernel is called with. `arguments.py` has the same structures; all fields are eight bytes wide.
#pragma once

#include <cstdint>

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

int threads();  // that a kernel may use

struct LinearCall {
    const void* x;              // [rows, in], rows x_stride values apart; for INT8 weights what kvrelay_quantize made
    const void* weight;         // panels
    const void* bias;           // [out] of the type of y, or null
    void* y;                    // [rows, out]
    const float* x_scale;       // [rows], INT8 only, as the two below
    const float* weight_scale;  // [out, padded to whole panels]
    const int32_t* zero_sum;    // [out, padded]
    int64_t rows, in, out, x_stride;
    int64_t weight_dtype, y_dtype;
};

struct QuantizeCall {
    const void* x;  // [rows, columns], rows x_stride values apart
    uint8_t* y;     // [rows, columns]: round(x / scale) + 128
    float* scale;   // [rows]: max |x| / 127
    int64_t rows, columns, x_stride;
    int64_t x_dtype;
};

struct RmsNormCall {
    const void* x;       // [rows, columns], rows x_stride values apart
    const void* weight;  // [columns]
    void* y;             // [rows, columns]
    int64_t rows, columns, x_stride;
    int64_t dtype;
    double epsilon;
    double weight_offset;    // added to the weight
    int64_t round_before;    // 1: to dtype before the weight is multiplied, 0: after
};

enum Operation : int64_t { COPY = 0, NEGATE = 1, ADD = 2, MULTIPLY = 3, SILU = 4 };

struct ElementwiseCall {
    const void* a;
    const void* b;  // of ADD and MULTIPLY
    void* y;
    int64_t operation;
    int64_t a_dtype, b_dtype, y_dtype;
    int64_t size[4];  // outermost first
    int64_t a_stride[4], b_stride[4], y_stride[4];  // values
};

struct Part {
    int64_t row, rows;  // its new tokens in the batch
    int64_t past;       // tokens before them
    int64_t table;      // where its block table begins in Batch::tables
};

struct Batch {
    int64_t num_parts;
    const Part* parts;
    const int32_t* tables;  // block numbers
};

enum Side : int64_t { KEYS = 0, VALUES = 1 };

struct StoreCall {
    const Batch* batch;
    const void* x;    // [rows, heads, dim], values of a head side by side
    void* to;         // blocks, as panels.h says
    uint16_t* scale;  // [blocks, heads, block_size] bfloat16, where `to` is INT8
    int64_t heads, dim, block_size, token_stride, head_stride;
    int64_t x_dtype, to_dtype;
    int64_t side;
};

struct AttendCall {
    const Batch* batch;
    const void* q;  // [rows, kv_heads · group, k_dim], values of a head side by side
    const void* k;  // blocks, as panels.h says
    const void* v;
    const uint16_t* k_scale;
    const uint16_t* v_scale;
    const float* sinks;  // [kv_heads · group] or null
    void* y;             // [rows, kv_heads · group, v_dim]
    int64_t kv_heads, group, k_dim, v_dim, block_size;
    int64_t q_token_stride, q_head_stride;
    int64_t window;  // tokens, 0 for all
    int64_t dtype, kv_dtype;
    double scale;
    double softcap;  // 0 for none
};
