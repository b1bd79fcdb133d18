"""Safeguards of planning: memory that is not there, files that contradict each other, and holes."""

from __future__ import annotations

from mutants.mutant import Mutant

TESTS = "unit/planning"

MUTANTS = (
    Mutant(
        "an automatic KV cache leaves other programs their memory",
        "kvrelay/planning/auto_kv_memory.py",
        "return min(share - weights - PROCESS_BYTES, free) - activations",
        "return share - weights - PROCESS_BYTES - activations",
        (
            f"{TESTS}/test_auto_kv_memory.py::test_it_never_takes_what_is_not_there",
            f"{TESTS}/test_auto_kv_memory.py::test_a_busy_host_gives_what_is_free",
        ),
    ),
    Mutant(
        "a config.json that belongs to other weights is refused",
        "kvrelay/planning/model_source.py",
        "if abs(held - said) > _TOLERANCE * said:",
        "if False:",
        ("unit/cli/test_plan.py::test_a_config_that_lies_about_its_weights_is_refused",),
    ),
    Mutant(
        "a recording with a hole has no rate",
        "kvrelay/planning/workload.py",
        "if rate is None and max(gaps) > max(_HOLE_S, _HOLE_SHARE * span):",
        "if False:",
        (f"{TESTS}/test_workload.py::test_a_hole_is_refused",),
    ),
)
