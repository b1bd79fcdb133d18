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
)
