// Paged KV as panels of 32 keys, the operands of products.
//
// The layout of a block of a KV head in the arena lets a product read the block in place and in
// order:
// - Keys are stored in groups of 32, or of 16 if the block size is not a multiple of 32. Each group
//   is [k_dim / values per word][group] words.
// - Values are summed over the keys. They are stored in panels of 32 columns, each [block_size /
//   values per word][32] words. The last panel may be narrower.
// - A word is one float32 or two bfloat16 values.
// - int8 KV has the same order, in words of the model's format, and a bfloat16 scale for each key:
//   [block_size].
// - int4 KV has such scales, too. Each byte has two values of a vector: i of each 32, plus 8, in the
//   low bits, and i + 16 in the high bits. Of the last values, if fewer than 32, the second half is
//   in the high bits. Keys are [bytes][group] for each group, values are [block_size][bytes] for each
//   panel of columns.
// - V that is the first values of K is not stored. Its panels are made from those of K
//   (transpose.h). With int4 KV its values are rotated like the keys, and the sums are rotated back.
#pragma once

#include "buffer.h"
#include "kernels.h"
#include "product.h"
#include "rotation.h"
#include "transpose.h"

inline int64_t group_of(int64_t block_size) { return block_size % PANEL ? LANES : PANEL; }

// Whether V is the first values of K.
inline bool v_in_k(const AttendCall& call) { return call.v == nullptr; }

// Whether sums over V are rotated back.
inline bool rotates_back(const AttendCall& call) { return v_in_k(call) && call.kv_dtype == INT4; }

// Columns of V that are summed: whole parts of the rotation if the sums are rotated back.
inline int64_t summed_columns(const AttendCall& call) {
    return rotates_back(call) ? round_up(call.v_dim, rotated_size(call.k_dim)) : call.v_dim;
}

// Offsets of the keys, values and scales of a KV head in a block, in values.
struct BlockPlace {
    int64_t k, v, scale;
};

// Adjacent keys of one KV head, from `first_key` on, that are processed together.
struct Round {
    int64_t head, first_key;
};

// 32 keys of one KV head.
template <class Format>
struct Panel {
    // [k_words].
    Columns k;
    // Values of the first and of the last 16 keys: panels of columns, each [HALF][32] words.
    const uint32_t* v[2];
    // Words from one panel of columns to the next.
    int64_t v_stride;
    // Only for int8 and int4 KV.
    f32x16 k_scale[2], v_scale[2];
};

template <class Format>
class Panels {
  public:
    using Value = typename Format::Value;
    static constexpr int PER_WORD = Format::PER_WORD;
    // Words along 16 keys.
    static constexpr int64_t HALF = LANES / PER_WORD;
    // Number of adjacent panels of the sequence that are valid at the same time.
    static constexpr int KEPT = 4;
    int64_t k_words, v_columns;

    // Opens one sequence. whole: the values of the two halves of a panel must be adjacent.
    void open(const AttendCall& attend_call, const Part& part, bool whole) {
        call = &attend_call;
        in_order = !whole || v_in_k(*call) || group_of(call->block_size) == PANEL;
        table = call->batch->tables + part.table;
        end = part.past + part.rows;
        k_words = call->k_dim / PER_WORD;
        v_columns = round_up(summed_columns(*call), PANEL);
    }

    // Sets `panel` to the keys of a KV head from `first` on, a multiple of 32. A panel that the
    // product cannot read in place is copied: quantised KV, the end of the sequence, and a narrower last
    // panel of columns. V that is in K is always made.
    void find(int64_t first, int64_t head, Panel<Format>& panel) {
        in_place(first) ? place(first, head, panel) : copy(first, head, panel);
        if (v_in_k(*call)) write_v<Format>(panel.k, k_words, v_columns, put_v(first, panel));
    }

    // Reads the beginning of up to KEPT panels into the cache. The processor prefetches the rest of a
    // memory page when it sees several reads of the page. Inlined, because GCC removes a call that
    // only prefetches.
    __attribute__((always_inline)) void touch(const Round& round) const {
        constexpr int64_t LINE = 64, LINES = 8;
        for (int64_t first = round.first_key; first < round.first_key + KEPT * PANEL && in_place(first); first += PANEL) {
            Panel<Format> panel;
            place(first, round.head, panel);
            for (int64_t i = 0; i < LINES; i++) {
                __builtin_prefetch((const char*)panel.k.left + i * LINE, 0, 2);
                if (!v_in_k(*call)) __builtin_prefetch((const char*)panel.v[0] + i * LINE, 0, 2);
            }
        }
    }

    // Reads a panel of quantised KV into the cache, while another is computed. Copying reads the
    // panel in small steps, and the processor does not prefetch them. Inlined as `touch` is.
    __attribute__((always_inline)) void prefetch(const Round& round) const {
        const int64_t group = group_of(call->block_size), packed = call->kv_dtype == INT4 ? 2 : 1;
        for (int64_t key = round.first_key; key < std::min(end, round.first_key + PANEL); key += group) {
            int64_t offset;
            const BlockPlace place = place_of(key, round.head, offset);
            prefetch((const char*)call->k + (place.k + offset * call->k_dim) / packed, group * call->k_dim / packed);
            if (v_in_k(*call)) continue;
            for (int64_t column = 0; column < call->v_dim; column += PANEL) {
                const int64_t width = std::min<int64_t>(PANEL, call->v_dim - column);
                const int64_t first = place.v + column * call->block_size + offset * width;
                prefetch((const char*)call->v + first / packed, group * width / packed);
            }
        }
    }

  private:
    const AttendCall* call;
    const int32_t* table;
    int64_t end;
    bool in_order;
    Buffer<Value> k_copy, v_copy;

    static __attribute__((always_inline)) void prefetch(const char* from, int64_t bytes) {
        constexpr int64_t LINE = 64;
        for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i);
    }

    BlockPlace place_of(int64_t key, int64_t head, int64_t& offset) const {
        offset = key % call->block_size;
        const int64_t index = (table[key / call->block_size] * call->kv_heads + head) * call->block_size;
        return {index * call->k_dim, index * call->v_dim, index};
    }

    bool in_place(int64_t first) const {
        const bool v_fits = v_in_k(*call) || call->v_dim == v_columns;
        return in_order && first + PANEL <= end && call->k_scale == nullptr && v_fits;
    }

    void place(int64_t first, int64_t head, Panel<Format>& panel) const {
        const int64_t group = group_of(call->block_size);
        const void* k[2];
        for (int half = 0; half < 2; half++) {
            if (half && group == PANEL) {
                // The second half follows the first half.
                k[1] = (const Value*)k[0] + LANES * PER_WORD;
                panel.v[1] = panel.v[0] + HALF * PANEL;
                break;
            }
            int64_t offset;
            const BlockPlace place = place_of(first + half * LANES, head, offset);
            k[half] = (const Value*)call->k + place.k + key_offset(offset);
            if (!v_in_k(*call)) panel.v[half] = (const uint32_t*)((const Value*)call->v + place.v + offset * PANEL);
        }
        panel.k = {k[0], k[1], group * (int64_t)sizeof(uint32_t)};
        panel.v_stride = call->block_size / PER_WORD * PANEL;
    }

    // Offset of the first word of a key in its block and head, in values.
    int64_t key_offset(int64_t offset) const {
        const int64_t group = group_of(call->block_size);
        return offset / group * group * call->k_dim + offset % group * PER_WORD;
    }

    // Sets where V of the panel is to be in the copy. Returns the place.
    uint32_t* put_v(int64_t first, Panel<Format>& panel) {
        const int64_t size = PANEL / PER_WORD * v_columns;
        uint32_t* v = (uint32_t*)v_copy.of(KEPT * size * PER_WORD) + first / PANEL % KEPT * size;
        panel.v[0] = v;
        panel.v[1] = v + HALF * PANEL;
        panel.v_stride = 2 * HALF * PANEL;
        return v;
    }

    // Missing keys are zero. An earlier user of the block may have left NaN, which a weight of zero
    // would not remove.
    void copy(int64_t first, int64_t head, Panel<Format>& panel) {
        const int64_t k_size = k_words * PANEL * PER_WORD, v_size = v_in_k(*call) ? 0 : PANEL * v_columns;
        Value* k = k_copy.of(KEPT * k_size) + first / PANEL % KEPT * k_size;
        Value* v = (Value*)put_v(first, panel);
        if (first + PANEL > end) std::fill_n(k, k_size, Value{});
        if (first + PANEL > end || call->v_dim != v_columns) std::fill_n(v, v_size, Value{});
        panel.k = {k, k + LANES * PER_WORD, PANEL * sizeof(uint32_t)};
        for (int half = 0; half < 2; half++) panel.k_scale[half] = panel.v_scale[half] = splat(1.0f);
        for (int half = 0; half < 2; half++) {
            const int64_t key = first + half * LANES, keys = std::min<int64_t>(LANES, end - key);
            if (keys <= 0) break;
            int64_t offset;
            const BlockPlace place = place_of(key, head, offset);
            Value* k_to = k + half * LANES * PER_WORD;
            Value* v_to = v + half * LANES * PANEL;
            if (call->kv_dtype == INT4)
                copy_half<uint8_t, 2>(place, offset, keys, k_to, v_to);
            else if (call->kv_dtype == INT8)
                copy_half<int8_t, 1>(place, offset, keys, k_to, v_to);
            else
                copy_half<Value, 1>(place, offset, keys, k_to, v_to);
            if (call->k_scale) {
                const uint16_t* v_scale = v_in_k(*call) ? call->k_scale : call->v_scale;
                panel.k_scale[half] = load_most(call->k_scale + place.scale + offset, keys);
                panel.v_scale[half] = load_most(v_scale + place.scale + offset, keys);
            }
        }
    }

    template <class Stored, int packed>
    void copy_half(const BlockPlace& place, int64_t offset, int64_t keys, Value* k_to, Value* v_to) const {
        copy_keys((const Stored*)call->k + place.k / packed, offset, keys, k_to);
        if (!v_in_k(*call)) copy_values((const Stored*)call->v + place.v / packed, offset, keys, v_to);
    }

    template <class Stored>
    void copy_keys(const Stored* k, int64_t offset, int64_t keys, Value* k_to) const {
        const int64_t group = group_of(call->block_size);
        k += key_offset(offset);
        for (int64_t word = 0; word < k_words; word++)
            convert(k + word * group * PER_WORD, k_to + word * PANEL * PER_WORD, keys * PER_WORD);
    }

    template <class Stored>
    void copy_values(const Stored* v, int64_t offset, int64_t keys, Value* v_to) const {
        const int64_t size = call->block_size;
        for (int64_t column = 0; column < call->v_dim; column += PANEL, v_to += PANEL * PANEL) {
            const int64_t width = std::min<int64_t>(PANEL, call->v_dim - column);
            const Stored* from = v + column * size + offset * width;
            for (int64_t key = 0; key < keys; key += PER_WORD) {
                Value* word = v_to + key * PANEL;
                convert(from + key * width, word, width * PER_WORD);
                // The second key of the last word is missing.
                if (key + PER_WORD > keys)
                    for (int64_t i = 0; i < width; i++) word[i * PER_WORD + 1] = Value{};
            }
        }
    }

    // Unpacks 16 keys of int4 KV, missing ones too: what they hold is finite, and their scale is zero.
    void copy_keys(const uint8_t* k, int64_t offset, int64_t, Value* k_to) const {
        const int64_t group = group_of(call->block_size);
        k += offset / group * group * call->k_dim / 2 + offset % group;
        for (int64_t dim = 0; dim < call->k_dim; dim += PANEL) {
            const int64_t half = std::min<int64_t>(PANEL, call->k_dim - dim) / 2;
            for (int64_t i = 0; i < half; i += PER_WORD, k += group * PER_WORD) {
                u32x16 bytes[PER_WORD];
                for (int w = 0; w < PER_WORD; w++) bytes[w] = read_as<u32x16>(k + w * group);
                put_words(bytes, k_to + (dim + i) * PANEL, k_to + (dim + half + i) * PANEL);
            }
        }
    }

    void copy_values(const uint8_t* v, int64_t offset, int64_t, Value* v_to) const {
        const int64_t size = call->block_size;
        for (int64_t column = 0; column < call->v_dim; column += PANEL, v_to += PANEL * PANEL) {
            const int64_t half = std::min<int64_t>(PANEL, call->v_dim - column) / 2;
            const uint8_t* from = v + column * size / 2 + offset * half;
            for (int64_t key = 0; key < LANES; key += PER_WORD) {
                u32x16 bytes[PER_WORD];
                for (int w = 0; w < PER_WORD; w++) bytes[w] = load_bytes(from + (key + w) * half, half);
                Value* to = v_to + key * PANEL;
                put_words(bytes, to, to + half * PER_WORD);
            }
        }
    }

    static u32x16 load_bytes(const uint8_t* from, int64_t count) {
        if (count == LANES) return read_as<u32x16>(from);
        uint8_t padded[LANES] = {};
        memcpy(padded, from, count);
        return read_as<u32x16>(padded);
    }

    // Writes 16 words of the values in the low bits and 16 words of those in the high bits, which may
    // overlap the end of the first words.
    static void put_words(const u32x16 (&bytes)[PER_WORD], Value* low, Value* high) {
        if constexpr (PER_WORD == 1) {
            store(low, to_floats((i32x16)(bytes[0] & 15) - 8));
            store(high, to_floats((i32x16)(bytes[0] >> 4) - 8));
        } else {
            const u32x16 both = bytes[0] + (bytes[1] << 16);
            write_as((uint32_t*)low, int4_pairs(both & 0x000f000f));
            write_as((uint32_t*)high, int4_pairs(both >> 4 & 0x000f000f));
        }
    }

    static void convert(const Value* from, Value* to, int64_t count) { memcpy(to, from, count * sizeof(Value)); }

    static void convert(const int8_t* from, Value* to, int64_t count) {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, read_as<f32x16>(from + i));
        for (; i < count; i++) put(to + i, from[i]);
    }
};
