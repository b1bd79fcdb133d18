// The arguments of the kernels. `arguments.py` has the same structures. All fields have eight
// bytes.
#pragma once

#include <cstdint>

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

// Number of threads that a kernel may use.
int threads();

// A kernel that computes rows [first, last), each from the same row of its inputs.
struct RowStep {
    void (*kernel)(const void* call, int64_t first, int64_t last);
    const void* call;
};

struct RowsCall {
    const RowStep* steps;
    int64_t count;
    int64_t rows;
    // Rows that all steps process before the next rows.
    int64_t block;
};

struct LinearCall {
    // [rows, in], with rows x_stride values apart. For INT8 weights, the output of
    // kvrelay_quantize.
    const void* x;
    // Panels.
    const void* weight;
    // [out] of the type of y, or null.
    const void* bias;
    // [rows, out].
    void* y;
    // [rows]. For INT8 only, like the next two fields.
    const float* x_scale;
    // [columns of all panels].
    const float* weight_scale;
    // [columns of all panels].
    const int32_t* zero_sum;
    int64_t rows, in, out, x_stride;
    int64_t weight_dtype, y_dtype;
    // 1: y is silu of the product, times the product with a second weight. The panels of the two
    // weights alternate.
    int64_t gated;
};

struct QuantizeCall {
    // [rows, columns], with rows x_stride values apart.
    const void* x;
    // [rows, columns]: round(x / scale) + 128.
    uint8_t* y;
    // [rows]: max |x| / 127.
    float* scale;
    int64_t columns, x_stride;
    int64_t x_dtype;
};

struct RmsNormCall {
    // [rows, columns], with rows x_stride values apart.
    const void* x;
    // [columns].
    const void* weight;
    // [rows, columns].
    void* y;
    int64_t columns, x_stride;
    int64_t dtype;
    double epsilon;
    // Added to the weight.
    double weight_offset;
    // 1: rounds to dtype before the multiplication with the weight. 0: rounds after it.
    int64_t round_before;
};

enum Operation : int64_t { COPY = 0, NEGATE = 1, ADD = 2, MULTIPLY = 3, SILU = 4 };

struct ElementwiseCall {
    const void* a;
    // Only for ADD and MULTIPLY.
    const void* b;
    void* y;
    int64_t operation;
    int64_t a_dtype, b_dtype, y_dtype;
    // The outermost dimension comes first. A row is the innermost dimension.
    int64_t size[4];
    // In values.
    int64_t a_stride[4], b_stride[4], y_stride[4];
};

struct Part {
    // The new tokens of the sequence in the batch.
    int64_t row, rows;
    // Number of tokens before the new tokens.
    int64_t past;
    // Index of the sequence's block table in Batch::tables.
    int64_t table;
};

struct Batch {
    int64_t num_parts;
    const Part* parts;
    // Block numbers.
    const int32_t* tables;
};

enum Side : int64_t { KEYS = 0, VALUES = 1 };

struct StoreCall {
    const Batch* batch;
    // [rows, heads, dim]. The values of a head are contiguous.
    const void* x;
    // Blocks in the layout of panels.h.
    void* to;
    // [blocks, heads, block_size] bfloat16, if `to` is INT8 or INT4.
    uint16_t* scale;
    int64_t heads, dim, block_size, token_stride, head_stride;
    int64_t x_dtype, to_dtype;
    int64_t side;
};

// Rotates vectors as the keys of INT4 KV are (rotation.h).
struct RotateCall {
    // [rows, heads, dim]. The values of a head are contiguous.
    const void* x;
    // [rows, heads, dim].
    void* y;
    int64_t rows, heads, dim, token_stride, head_stride;
    int64_t dtype;
};

struct AttendCall {
    const Batch* batch;
    // [rows, kv_heads · group, k_dim], rotated for INT4 KV. The values of a head are contiguous.
    const void* q;
    // Blocks in the layout of panels.h, like v.
    const void* k;
    // Null if V is the first v_dim values of K.
    const void* v;
    // For INT8 and INT4 KV, else null. The scales of V that is in K are those of K.
    const uint16_t* k_scale;
    const uint16_t* v_scale;
    // [kv_heads · group] or null.
    const float* sinks;
    // [rows, kv_heads · group, v_dim].
    void* y;
    int64_t kv_heads, group, k_dim, v_dim, block_size;
    int64_t q_token_stride, q_head_stride;
    // Tokens; 0: unbounded.
    int64_t window;
    int64_t dtype, kv_dtype;
    double scale;
    // 0: none.
    double softcap;
};

// Rows of the batch with the same adapter: AdapterRows::rows [first, first + count).
struct AdapterGroup {
    int64_t first, count;
    // Index into LowRankCall::factors.
    int64_t slot;
};

struct AdapterRows {
    int64_t num_groups;
    const AdapterGroup* groups;
    // Numbers of rows, group after group.
    const int64_t* rows;
};

// The factors of one adapter for one layer. Rank 0: the adapter does not change the layer.
struct LowRankFactors {
    // [rank, in].
    const void* a;
    // [panels of 32 outputs][rank][32].
    const void* b;
    int64_t rank;
    double scale;
};

struct LowRankCall {
    const AdapterRows* adapters;
    // By slot.
    const LowRankFactors* factors;
    // [rows, in], with rows x_stride values apart.
    const void* x;
    // [rows, panels], with rows y_stride values and panels of 32 outputs panel_stride values apart.
    void* y;
    int64_t in, out, x_stride, y_stride, panel_stride;
    // Of x, y, a and b.
    int64_t dtype;
};
