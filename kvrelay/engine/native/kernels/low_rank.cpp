// y += scale · (x Aᵀ) Bᵀ for the rows that have an adapter (LoRA, Hu et al. 2021). Each row takes the factors of its own
// adapter, so one call serves a batch of any mixture of adapters.
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr int64_t PANEL = 32, ROWS = 2, RANKS = 2;

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
    for (int64_t i = 0; i < whole; i += LANES)
        for (int r = 0; r < R; r++)
            for (int k = 0; k < K; k++) sums[r][k] += load(x[r] + i) * load(a[k] + i);
    if (rest)
        for (int r = 0; r < R; r++)
            for (int k = 0; k < K; k++) sums[r][k] += load_some(x[r] + whole, rest) * load_some(a[k] + whole, rest);
    for (int r = 0; r < R; r++)
        for (int k = 0; k < K; k++)
            inner[r * rows.factors->rank + rank + k] = sum_of(sums[r][k]) * (float)rows.factors->scale;
}

template <int R, class T>
void shrink_all(const LowRankCall& call, const Rows& rows, float* inner) {
    const int64_t rank = rows.factors->rank, even = rank / RANKS * RANKS;
    for (int64_t k = 0; k < even; k += RANKS) shrink<R, RANKS, T>(call, rows, k, inner);
    for (int64_t k = even; k < rank; k++) shrink<R, 1, T>(call, rows, k, inner);
}

// y += inner Bᵀ for R rows and one panel of outputs.
template <int R, class T>
void expand(const LowRankCall& call, const Rows& rows, int64_t panel, const float* inner) {
    const int64_t rank = rows.factors->rank;
    const T* b = (const T*)rows.factors->b + panel * rank * PANEL;
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
    static thread_local Buffer<float> buffer;
    std::vector<Rows>& work = kept;
    work.clear();
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
    }
    if (work.empty()) return;
    float* inner = buffer.of(size);
    const int64_t count = (int64_t)work.size(), panels = (call.out + PANEL - 1) / PANEL;
#pragma omp parallel if (threads() > 1) num_threads(threads())
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++)
            work[i].count == ROWS ? shrink_all<ROWS, T>(call, work[i], inner + work[i].inner)
                                  : shrink_all<1, T>(call, work[i], inner + work[i].inner);
        // A panel of each adapter is read once for all of its rows.
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++)
            for (int64_t i = 0; i < count; i++)
                work[i].count == ROWS ? expand<ROWS, T>(call, work[i], p, inner + work[i].inner)
                                      : expand<1, T>(call, work[i], p, inner + work[i].inner);
    }
}

}  // namespace

extern "C" void kvrelay_low_rank(const LowRankCall* call) {
    call->dtype == BFLOAT16 ? low_rank<uint16_t>(*call) : low_rank<float>(*call);
}
