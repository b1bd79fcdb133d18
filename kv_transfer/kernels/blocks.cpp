// Copies KV blocks between arenas and digests them on the way, in one pass over memory: each block's digest is XXH3-64
// (Collet, xxHash, seed 0) of its bytes, region after region.
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int STRIPE = 64;              // bytes that go into the eight accumulators at a time
constexpr int STRIPES_PER_ROUND = 16;   // then the accumulators are scrambled
constexpr int SECRET = 192;
constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u;
constexpr uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;

// The algorithm's default secret.
alignas(64) constexpr uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t Lanes __attribute__((vector_size(STRIPE), aligned(1), may_alias));

inline Lanes load(const void* address) { return *(const Lanes*)address; }

// Of each lane the low half times the high half.
inline Lanes multiply_halves(Lanes value) {
#ifdef __AVX512F__
    return (Lanes)_mm512_mul_epu32((__m512i)value, (__m512i)(value >> 32));
#else
    return (value & 0xFFFFFFFFu) * (value >> 32);
#endif
}

inline Lanes swap_neighbours(Lanes value) { return __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6); }

inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

inline uint64_t word(const uint8_t* address) {
    uint64_t value;
    memcpy(&value, address, sizeof(value));
    return value;
}

// XXH3-64 of an input of several pieces, each a multiple of a stripe.
struct Digest {
    Lanes lanes = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    int64_t stripes = 0;

    void accumulate(Lanes data, const uint8_t* key) {
        lanes += swap_neighbours(data) + multiply_halves(data ^ load(key));
    }

    // Not the input's last stripe.
    void add(Lanes data) {
        make_round();
        accumulate(data, secret + 8 * (stripes % STRIPES_PER_ROUND));
        stripes++;
    }

    uint64_t finish(Lanes last) {
        make_round();
        accumulate(last, secret + SECRET - STRIPE - 7);
        uint64_t hash = (uint64_t)(stripes + 1) * STRIPE * PRIME64_1;
        for (int i = 0; i < 4; i++)
            hash += fold(lanes[2 * i] ^ word(secret + 11 + 16 * i), lanes[2 * i + 1] ^ word(secret + 19 + 16 * i));
        hash ^= hash >> 37;
        hash *= 0x165667919E3779F9u;
        return hash ^ (hash >> 32);
    }

  private:
    void make_round() {
        if (stripes == 0 || stripes % STRIPES_PER_ROUND) return;
        lanes ^= lanes >> 47;
        lanes ^= load(secret + SECRET - STRIPE);
        lanes *= PRIME32_1;
    }
};

inline void store(uint8_t* target, Lanes value) {
#ifdef __AVX512F__
    _mm512_stream_si512((__m512i*)target, (__m512i)value);  // past the caches: it is read much later
#else
    *(Lanes*)target = value;
#endif
}

constexpr int AHEAD = 2048;  // bytes: the processor's own prefetcher stops at the end of a page

template <bool COPY, bool DIGEST>
Digest piece(const uint8_t* source, uint8_t* target, int64_t size, Digest digest) {
    for (int64_t at = 0; at < size; at += STRIPE) {
        __builtin_prefetch(source + at + AHEAD);
        const Lanes data = load(source + at);
        if (COPY) store(target + at, data);
        if (DIGEST) digest.add(data);
    }
    return digest;
}

struct Call {
    const uint8_t* source;
    uint8_t* target;  // or none; aligned to 64 bytes
    const int64_t *source_blocks, *target_blocks;  // [count]
    int64_t count;
    const int64_t* region_bytes;  // [regions] of a block; multiples of 64
    const int64_t *source_starts, *target_starts;  // [regions]: where each begins
    int64_t regions;
    uint64_t* digests;  // [count], or none
};

template <bool COPY, bool DIGEST>
void run(const Call& call) {
    std::vector<Digest> digests(DIGEST ? call.count : 1);
    for (int64_t region = 0; region < call.regions; region++) {
        const int64_t size = call.region_bytes[region];
        const bool last = region == call.regions - 1;
        for (int64_t i = 0; i < call.count; i++) {
            const uint8_t* source = call.source + call.source_starts[region] + call.source_blocks[i] * size;
            uint8_t* target = COPY ? call.target + call.target_starts[region] + call.target_blocks[i] * size : nullptr;
            Digest& digest = digests[DIGEST ? i : 0];
            const int64_t whole = DIGEST && last ? size - STRIPE : size;
            digest = piece<COPY, DIGEST>(source, target, whole, digest);
            if (DIGEST && last) {
                const Lanes data = load(source + whole);
                if (COPY) store(target + whole, data);
                call.digests[i] = digest.finish(data);
            }
        }
    }
#ifdef __AVX512F__
    if (COPY) _mm_sfence();
#endif
}

}  // namespace

extern "C" void kvrelay_blocks(const Call* call) {
    if (!call->target) return run<false, true>(*call);
    if (!call->digests) return run<true, false>(*call);
    run<true, true>(*call);
}
