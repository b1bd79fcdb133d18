// y += scale · (x Aᵀ) Bᵀ for the rows that have an adapter (LoRA, Hu et al. 2021). Each row takes the factors of its own
// adapter, so one call serves a batch of any mixture of adapters.
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t RANKS = 4;
#else
// Registers hold no more sums.
constexpr int64_t RANKS = 2;
#endif
constexpr int64_t PANEL = 32, ROWS = 2;
// Bytes of a line of the cache, and panels that are read ahead: memory takes longer to answer than a panel to compute.
constexpr int64_t LINE = 64, AHEAD = 4;

// Up to ROWS rows with the same factors.
struct Rows {
    const LowRankFactors* factors;
    int64_t row[ROWS];
    int64_t count;
    // Place of their inner values: [count, rank].
    int64_t inner;
};

// inner = scale · x Aᵀ for R rows and K ranks. Each sum is computed in the same order for all R and K.
template <int R, int K, class T>
void shrink(const LowRankCall& call, const Rows& rows, int64_t rank, float* inner) {
    const T *x[R], *a[K];
    for (int r = 0; r < R; r++) x[r] = (const T*)call.x + rows.row[r] * call.x_stride;
    for (int k = 0; k < K; k++) a[k] = (const T*)rows.factors->a + (rank + k) * call.in;
    f32x16 sums[R][K] = {};
    const int64_t whole = call.in / LANES * LANES, rest = call.in - whole;
    for (int64_t i = 0; i < whole; i += LANES) {
        for (int k = 0; k < K; k++) __builtin_prefetch(a[k] + K * call.in + i);
        for (int r = 0; r < R; r++)
            for (int k = 0; k < K; k++) sums[r][k] += load(x[r] + i) * load(a[k] + i);
    }
    if (rest)
        for (int r = 0; r < R; r++)
            for (int k = 0; k < K; k++) sums[r][k] += load_some(x[r] + whole, rest) * load_some(a[k] + whole, rest);
    for (int r = 0; r < R; r++)
        for (int k = 0; k < K; k++)
            inner[r * rows.factors->rank + rank + k] = sum_of(sums[r][k]) * (float)rows.factors->scale;
}

template <int R, class T>
void shrink_all(const LowRankCall& call, const Rows& rows, float* inner) {
    const int64_t rank = rows.factors->rank, whole = rank / RANKS * RANKS;
    for (int64_t k = 0; k < whole; k += RANKS) shrink<R, RANKS, T>(call, rows, k, inner);
    for (int64_t k = whole; k < rank; k++) shrink<R, 1, T>(call, rows, k, inner);
}

template <class T>
const T* panel_of(const LowRankFactors& factors, int64_t panel) {
    return (const T*)factors.b + panel * factors.rank * PANEL;
}

// Asks for a panel, so that it is in the cache when it is needed.
template <class T>
void prefetch(const LowRankFactors& factors, int64_t panel) {
    const char* bytes = (const char*)panel_of<T>(factors, panel);
    for (int64_t i = 0; i < factors.rank * PANEL * (int64_t)sizeof(T); i += LINE) __builtin_prefetch(bytes + i);
}

// y += inner Bᵀ for R rows and one panel of outputs.
template <int R, class T>
void expand(const LowRankCall& call, const Rows& rows, int64_t panel, const float* inner) {
    const int64_t rank = rows.factors->rank;
    const T* b = panel_of<T>(*rows.factors, panel);
    f32x16 sums[R][2] = {};
    for (int64_t k = 0; k < rank; k++, b += PANEL)
        for (int r = 0; r < R; r++) {
            const float value = inner[r * rank + k];
            sums[r][0] += load(b) * value;
            sums[r][1] += load(b + LANES) * value;
        }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            const int64_t count = call.out - panel * PANEL - half * LANES;
            if (count <= 0) continue;
            T* y = (T*)call.y + rows.row[r] * call.y_stride + panel * call.panel_stride + half * LANES;
            const f32x16 values = load_most(y, count) + sums[r][half];
            count >= LANES ? store(y, values) : store_some(y, values, count);
        }
}

template <class T>
void low_rank(const LowRankCall& call) {
    static thread_local std::vector<Rows> kept;
    static thread_local std::vector<int64_t> kept_ends;
    static thread_local Buffer<float> buffer;
    std::vector<Rows>& work = kept;
    // Of the rows of each adapter in `work`.
    std::vector<int64_t>& ends = kept_ends;
    work.clear();
    ends.clear();
    int64_t size = 0;
    for (int64_t g = 0; g < call.adapters->num_groups; g++) {
        const AdapterGroup& group = call.adapters->groups[g];
        const LowRankFactors* factors = call.factors + group.slot;
        if (!factors->rank) continue;
        for (int64_t i = 0; i < group.count; i += ROWS) {
            Rows rows{factors, {}, std::min(ROWS, group.count - i), size};
            for (int64_t r = 0; r < rows.count; r++) rows.row[r] = call.adapters->rows[group.first + i + r];
            work.push_back(rows);
            size += rows.count * factors->rank;
        }
        ends.push_back((int64_t)work.size());
    }
    if (work.empty()) return;
    float* inner = buffer.of(size);
    const int64_t count = (int64_t)work.size(), panels = (call.out + PANEL - 1) / PANEL;
    const int64_t all_panels = panels * (int64_t)ends.size();
#pragma omp parallel if (threads() > 1) num_threads(threads())
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++)
            work[i].count == ROWS ? shrink_all<ROWS, T>(call, work[i], inner + work[i].inner)
                                  : shrink_all<1, T>(call, work[i], inner + work[i].inner);
        // The panels of an adapter follow each other in memory. Each is read once for all rows of the adapter.
#pragma omp for schedule(static)
        for (int64_t n = 0; n < all_panels; n++) {
            const int64_t adapter = n / panels, later = std::min(n + AHEAD, all_panels - 1);
            prefetch<T>(*work[ends[later / panels] - 1].factors, later % panels);
            for (int64_t i = adapter ? ends[adapter - 1] : 0; i < ends[adapter]; i++)
                work[i].count == ROWS ? expand<ROWS, T>(call, work[i], n % panels, inner + work[i].inner)
                                      : expand<1, T>(call, work[i], n % panels, inner + work[i].inner);
        }
    }
}

}  // namespace

extern "C" void kvrelay_low_rank(const LowRankCall* call) {
    call->dtype == BFLOAT16 ? low_rank<uint16_t>(*call) : low_rank<float>(*call);
}
