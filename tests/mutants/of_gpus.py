"""Safeguards of GPUs, of which none runs the tests."""

from __future__ import annotations

from mutants.mutant import Mutant

CUDA_FORWARD = "kvrelay/engine/forward/cuda_forward.py"
CHECK_STEPS = "kvrelay/engine/forward/check_steps.py"
TESTS = "unit/engine/forward/test_cuda_forward.py::"

MUTANTS = (
    Mutant(
        "NIXL reads into memory after the copies out of it",
        "kv_transfer/transports/nixl.py",
        "        finish(self._device)\n",
        "",
        (
            "unit/kv_transfer/test_nixl_on_a_gpu.py::test_memory_is_read_into_again_once_the_copies_out_of_it_are_complete",
        ),
    ),
    Mutant(
        "attention on a GPU is compared with plain operators",
        CHECK_STEPS,
        "if not explained(found, wanted):",
        "if False:",
        (TESTS + "test_wrong_attention_is_refused",),
    ),
    Mutant(
        "attention on a GPU is compared closely",
        CHECK_STEPS,
        "max(1e-5, 4 * torch.finfo(wanted.dtype).eps)",
        "0.12",
        (TESTS + "test_wrong_attention_is_refused",),
    ),
    Mutant(
        "a captured step is compared with the model",
        CUDA_FORWARD,
        "if not explained(self._replay(captured, second), wanted):",
        "if False:",
        (TESTS + "test_a_captured_step_that_is_wrong_is_not_used",),
    ),
    Mutant(
        "a size for which memory is missing leaves the others captured",
        CUDA_FORWARD,
        'self.not_captured = f"steps of {size} sequences: {error}"',
        "return",
        (TESTS + "test_sizes_for_which_memory_is_missing_are_left_out",),
    ),
    Mutant(
        "missing memory for the largest step is told before the worker serves",
        "kvrelay/engine/runner.py",
        "if not isinstance(self._forward, CudaForward):\n            return",
        "if True:\n            return",
        (TESTS + "test_the_largest_step_is_tried_before_the_worker_serves",),
    ),
    Mutant(
        "kvrelay's own engine needs flashinfer on a GPU",
        "kvrelay/launch/checks/engine_check.py",
        '    _check_gpus(config)\n    if config.decode.engine == "vllm":',
        '    if config.decode.engine == "vllm":',
        ("unit/launch/test_engine_check.py::test_on_gpus_the_own_engine_needs_flashinfer",),
    ),
)
