"""Safeguards of the scaling policy: what wakes an empty pool, and what keeps pools steady."""

from __future__ import annotations

from mutants.mutant import Mutant

POLICY = "autoscaler/scaling_policy.py"
TESTS = "unit/autoscaler"

MUTANTS = (
    Mutant(
        "a prompt that waits for an empty pool wakes it",
        POLICY,
        "size = max(size, 1)",
        "pass",
        (
            f"{TESTS}/test_policy_values.py::test_a_pool_that_may_be_empty_wakes_whatever_the_policy",
        ),
    ),
    Mutant(
        "a small pool keeps room for requests that arrive at random",
        POLICY,
        "max(load / BUSY_AT_MOST, load + math.sqrt(load))",
        "load / BUSY_AT_MOST",
        (
            f"{TESTS}/test_scaling_policy.py::test_the_least_size_leaves_room_for_chance",
            f"{TESTS}/test_scaling_policy.py::test_short_queues_shrink_no_pool_that_is_needed",
        ),
    ),
    Mutant(
        "a decode worker's utilisation counts what its batch adds to the steps",
        "kvrelay/worker/steps/step_cost.py",
        "return 1 - (1 - min(1.0, added)) * (1 - min(1.0, fill))",
        "return min(1.0, fill) ** 0.5",
        ("unit/worker/test_step_cost.py::test_twice_the_utilisation_is_twice_the_throughput",),
    ),
)
