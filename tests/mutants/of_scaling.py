"""Safeguards of the scaling policy: what wakes an empty pool, what keeps pools steady, and what
looks ahead.
"""

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
    Mutant(
        "noise is no trend",
        "autoscaler/arrivals.py",
        "moved / spread - math.sqrt(mean / spread)",
        "moved / spread",
        (f"{TESTS}/test_arrivals.py::test_noise_is_seldom_a_trend",),
    ),
    Mutant(
        "a load that falls is not expected to fall",
        "autoscaler/arrivals.py",
        "trend = max(0.0, moved",
        "trend = (moved",
        (f"{TESTS}/test_arrivals.py::test_a_falling_load_is_not_expected_to_fall",),
    ),
    Mutant(
        "a router that starts again takes no arrivals away",
        "autoscaler/arrivals.py",
        "max(0, one.admitted - before)",
        "one.admitted - before",
        (f"{TESTS}/test_arrivals.py::test_routers_that_come_go_and_start_again_are_no_arrivals",),
    ),
    Mutant(
        "what workers measure corrects a profile",
        "autoscaler/look_ahead.py",
        "ratio, work = self._corrections[pool].ratio, demand.workload",
        "ratio, work = 1.0, demand.workload",
        (f"{TESTS}/test_look_ahead.py::test_a_profile_that_is_off_is_corrected",),
    ),
    Mutant(
        "an overloaded pool does not lower what is expected of the load",
        "autoscaler/look_ahead.py",
        "if measured < _SPARE_SHARE * len(loads) or measured > correction.ratio * expected:",
        "if True:",
        (f"{TESTS}/test_look_ahead.py::test_an_overloaded_pool_does_not_hide_its_load",),
    ),
)
