// Runs a list of kernel calls without returning to Python between the calls.
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
