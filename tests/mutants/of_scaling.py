"""Safeguards of the scaling policy: what wakes an empty pool, what keeps pools steady, and what
looks ahead.
"""

from __future__ import annotations

from mutants.mutant import Mutant

POLICY = "autoscaler/scaling_policy.py"
TESTS = "unit/autoscaler"

MUTANTS = (
    Mutant(
        "a pool without a worker gets room before others grow",
        "autoscaler/actuator.py",
        "starved = await self._make_room(infos)",
        "starved = None",
        (
            "unit/autoscaler/test_starved_pool.py::"
            "test_the_last_decode_worker_comes_back_while_prefill_workers_wait",
            "unit/autoscaler/test_starved_pool.py::"
            "test_no_pool_stays_without_a_worker_that_another_could_give_up",
        ),
    ),
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
        "a pool's queue is a mean over time when requests wait for both pools by turns",
        "router/core/queueing/bottleneck.py",
        "if self._waited > 0:",
        "if False:",
        (
            "unit/simulation/test_simulation_properties.py::test_two_pools_that_are_too_small_both_grow",
            "unit/router/core/test_bottleneck.py::test_it_is_the_mean_with_weights_that_fade",
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
        "kvrelay/worker/steps/measured_step_cost.py",
        "return 1 - (1 - min(1.0, added)) * (1 - min(1.0, fill))",
        "return min(1.0, fill) ** 0.5",
        (
            "unit/worker/test_measured_step_cost.py::test_twice_the_utilisation_is_twice_the_throughput",
        ),
    ),
    Mutant(
        "noise is no trend",
        "autoscaler/arrivals.py",
        "max(0.0, slope - error)",
        "slope",
        (f"{TESTS}/test_arrivals.py::test_noise_is_seldom_a_trend",),
    ),
    Mutant(
        "a load that falls is not expected to fall",
        "autoscaler/arrivals.py",
        "min(0.0, slope + error) * (end - middle)",
        "(slope + error) * (end - middle + ahead_s)",
        (f"{TESTS}/test_arrivals.py::test_a_falling_load_counts_as_it_is",),
    ),
    Mutant(
        "after a sudden fall no less is expected",
        "autoscaler/arrivals.py",
        "min(mean, self.recent_rate(span / 3) or 0.0)",
        "0.0",
        (f"{TESTS}/test_arrivals.py::test_after_a_sudden_fall_no_less_is_expected",),
    ),
    Mutant(
        "a dip does not raise what is expected",
        "autoscaler/arrivals.py",
        "min(mean, self.recent_rate(span / 3) or 0.0)",
        "self.recent_rate(span / 3) or 0.0",
        (f"{TESTS}/test_arrivals.py::test_one_request_more_does_not_change_what_is_expected",),
    ),
    Mutant(
        "a router that starts again brings no arrivals",
        "autoscaler/arrivals.py",
        "begun >= before[name][0] for name",
        "True for name",
        (f"{TESTS}/test_arrivals.py::test_what_nobody_saw_is_no_arrival",),
    ),
    Mutant(
        "requests that a tenant's limit holds back are no arrivals",
        "autoscaler/arrivals.py",
        "one.begun + one.waiting - one.waiting_at_limit",
        "one.begun + one.waiting",
        (f"{TESTS}/test_arrivals.py::test_requests_that_a_limit_holds_back_do_not_count",),
    ),
    Mutant(
        "counts from before a gap are forgotten",
        "autoscaler/arrivals.py",
        "or now - self._counts[-1][0] > self._gap_s",
        "",
        (f"{TESTS}/test_arrivals.py::test_counts_of_hours_ago_are_forgotten",),
    ),
    Mutant(
        "an error of the look-ahead does not end the controller",
        "autoscaler/loop.py",
        "except Exception as error:\n            if repr",
        "except ZeroDivisionError as error:\n            if repr",
        (f"{TESTS}/test_loop.py::test_the_other_metrics_go_on_without_the_look_ahead",),
    ),
    Mutant(
        "steps that take no time are refused",
        "kvrelay/config/config_file.py",
        "< _LEAST_STEP_S:",
        "< 0:",
        ("unit/config/test_config_file.py::test_a_profile_that_is_none",),
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
        "autoscaler/load_correction.py",
        "if measured < 0.9 * workers or measured > self.ratio * expected:",
        "if True:",
        (f"{TESTS}/test_look_ahead.py::test_an_overloaded_pool_does_not_hide_its_load",),
    ),
    Mutant(
        "a request without work is no load",
        "router/core/recent_requests.py",
        "cached = cached if output else prompt",
        "pass",
        ("unit/router/core/test_recent_requests.py::test_a_cancelled_prompt_was_no_work",),
    ),
)
