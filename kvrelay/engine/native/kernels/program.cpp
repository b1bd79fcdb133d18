// Runs a list of kernel calls without returning to Python between the calls.
#include <algorithm>

#include "kernels.h"

static int num_threads = 1;

int threads() { return num_threads; }

extern "C" void kvrelay_set_threads(int64_t count) { num_threads = (int)count; }

struct Step {
    void (*kernel)(const void* call);
    const void* call;
};

extern "C" void kvrelay_run(const Step* steps, int64_t count) {
    for (int64_t i = 0; i < count; i++) steps[i].kernel(steps[i].call);
}

// All steps process some rows before the next rows, so what one step writes is still in the
// second-level cache when the next step reads it.
extern "C" void kvrelay_run_rows(const RowsCall* call) {
    const bool several = threads() > 1 && call->rows > call->block;
    const int64_t share = (call->rows + threads() - 1) / threads(), block = std::min(call->block, share);
#pragma omp parallel for schedule(dynamic) if (several) num_threads(threads())
    for (int64_t first = 0; first < call->rows; first += block)
        for (int64_t i = 0; i < call->count; i++)
            call->steps[i].kernel(call->steps[i].call, first, std::min(first + block, call->rows));
}
