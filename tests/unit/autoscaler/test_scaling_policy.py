from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.scaling_policy import (
    BUSY_AT_MOST,
    Decision,
    PoolSnapshot,
    PoolState,
    decide,
    least_size,
)
from kvrelay.config.autoscaling_policy import MetricName, MetricTarget, PoolPolicy


def policy(
    *targets: tuple[MetricName, float],
    up: float = 0,
    down: float = 0,
    bounds: tuple[int, int] = (0, 1000),
    steps: tuple[int, int] = (1000, 1000),
    tolerance: float = 0.1,
) -> PoolPolicy:
    return PoolPolicy(
        min_replicas=bounds[0],
        max_replicas=bounds[1],
        metrics=tuple(MetricTarget(name=name, target=target) for name, target in targets),
        upscale_delay_s=up,
        downscale_delay_s=down,
        max_step_up=steps[0],
        max_step_down=steps[1],
        tolerance=tolerance,
    )


def at_once(
    rules: PoolPolicy, size: int, metrics: Mapping[MetricName, float], ready: int | None = None
) -> Decision:
    return decide(PoolSnapshot(size, size if ready is None else ready, metrics), rules, None, 0.0)[
        0
    ]


def run(
    rules: PoolPolicy,
    size: int,
    load: Callable[[float, int], Mapping[MetricName, float]],
    times: list[float],
) -> list[int]:
    """Sizes after a look at each of `times`, every decision being followed at once."""
    state: PoolState | None = None
    sizes = []
    for now in times:
        decision, state = decide(PoolSnapshot(size, size, load(now, size)), rules, state, now)
        size = decision.desired
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(
    ("size", "value", "target", "after"),
    [
        (3, 200, 100, 6),  # Kubernetes' own: twice the target doubles the replicas
        (4, 50, 100, 2),  # half the target halves them
        (5, 50, 100, 3),  # rounded up
        (50, 90, 75, 60),  # from the announcement of configurable tolerance
        (2, 1000, 200, 10),
        (10, 110, 100, 10),  # within the tolerance of 10 %
        (10, 90, 100, 10),
        (10, 111, 100, 12),
        (10, 89, 100, 9),
        (1, 2.1, 0.7, 3),  # and not 4 for a quotient of 3.0000000000000004
    ],
)
def test_the_hpas_examples(size: int, value: float, target: float, after: int) -> None:
    assert at_once(policy(("itl_p95_ms", target)), size, {"itl_p95_ms": value}).desired == after


@pytest.mark.parametrize(
    ("size", "total", "target", "after"),
    [(1, 37, 4, 10), (0, 5, 4, 2), (0, 0, 4, 0), (10, 41, 4, 10), (10, 45, 4, 12), (8, 3, 4, 1)],
)
def test_queue_metrics_are_totals_with_a_target_per_worker(
    size: int, total: int, target: float, after: int
) -> None:
    assert at_once(policy(("queue_depth", target)), size, {"queue_depth": total}).desired == after
    assert at_once(policy(("queue_tokens", target)), size, {"queue_tokens": total}).desired == after


def test_ratio_metrics_speak_for_the_workers_that_are_ready() -> None:
    assert at_once(policy(("kv_occupancy", 0.5)), 4, {"kv_occupancy": 1.0}, ready=3).desired == 6
    hold = at_once(policy(("kv_occupancy", 0.5)), 4, {"kv_occupancy": 1.0}, ready=0)
    assert hold == Decision(4, "no metric is known")


def test_the_largest_answer_wins() -> None:
    rules = policy(("queue_depth", 2), ("kv_occupancy", 0.8), ("queue_wait_p95_ms", 100))
    decision = at_once(rules, 4, {"queue_depth": 12, "kv_occupancy": 0.1, "queue_wait_p95_ms": 50})
    assert decision.desired == 6
    assert decision.reason.startswith("queue_depth 12")


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -1.0])
def test_what_is_not_known_never_shrinks_a_pool(bad: float | None) -> None:
    rules = policy(("queue_depth", 2), ("ttft_p95_ms", 100))
    metrics: dict[MetricName, float] = {} if bad is None else {"ttft_p95_ms": bad}
    assert at_once(rules, 4, metrics).desired == 4
    down = at_once(rules, 4, metrics | {"queue_depth": 0})
    assert down.desired == 4
    assert down.reason.endswith("but not known: ttft_p95_ms")
    assert at_once(rules, 4, metrics | {"queue_depth": 20}).desired == 10, "but it may grow"


@pytest.mark.parametrize(
    ("rules", "size", "metrics", "decision"),
    [
        (
            policy(("queue_depth", 4), steps=(2, 1)),
            1,
            {"queue_depth": 37},
            Decision(
                3, "queue_depth 37 over 1 worker / target 4 → 10, limited to +2 by max_step_up"
            ),
        ),
        (
            policy(("queue_depth", 4), steps=(2, 1)),
            5,
            {"queue_depth": 3},
            Decision(
                4, "queue_depth 3 over 5 workers / target 4 → 1, limited to -1 by max_step_down"
            ),
        ),
        (
            policy(("queue_depth", 4), bounds=(1, 6)),
            3,
            {"queue_depth": 37},
            Decision(
                6, "queue_depth 37 over 3 workers / target 4 → 10, limited to 6 by max_replicas"
            ),
        ),
        (
            policy(("queue_depth", 4), bounds=(2, 6)),
            3,
            {"queue_depth": 0},
            Decision(
                2, "queue_depth 0 over 3 workers / target 4 → 0, limited to 2 by min_replicas"
            ),
        ),
        (
            policy(("queue_depth", 4), up=5),
            1,
            {"queue_depth": 37},
            Decision(
                1, "queue_depth 37 over 1 worker / target 4 → 10, not yet for upscale_delay_s 5", 10
            ),
        ),
        (
            policy(("kv_occupancy", 0.8)),
            4,
            {"kv_occupancy": 0.82},
            Decision(4, "kv_occupancy 0.82 over 4 workers / target 0.8 is within tolerance 0.1"),
        ),
        (policy(bounds=(2, 4)), 1, {}, Decision(2, "1 is below min_replicas 2")),
        (policy(bounds=(2, 4)), 9, {}, Decision(4, "9 is above max_replicas 4")),
        (policy(bounds=(2, 4)), 3, {}, Decision(3, "no metric is known")),
    ],
    ids=lambda value: value.reason if isinstance(value, Decision) else "",
)
def test_the_reason_has_the_numbers(
    rules: PoolPolicy, size: int, metrics: Mapping[MetricName, float], decision: Decision
) -> None:
    assert at_once(rules, size, metrics) == decision


@pytest.mark.parametrize(
    ("size", "busy_share", "after"),
    [
        *((4, 0.0, 1), (4, 0.09, 1), (4, 0.1, 2), (4, 0.25, 2), (4, 0.3, 3), (4, 1.0, 4)),
        # In a large pool, 30% of idle workers are more than the square root of the busy ones.
        *((20, 0.6, 18), (9, 0.7, 9), (2, None, 1)),
        # Odd values in the registry.
        *((4, -3.0, 1), (4, math.inf, 4), (4, math.nan, 4)),
    ],
)
def test_short_queues_shrink_no_pool_that_is_needed(
    size: int, busy_share: float | None, after: int
) -> None:
    for rules in (
        policy(("queue_depth", 2), bounds=(1, 20)),
        policy(("ttft_p95_ms", 500), bounds=(1, 20)),
    ):
        metrics: dict[MetricName, float] = {"queue_depth": 0, "ttft_p95_ms": 20}
        decision, _ = decide(PoolSnapshot(size, size, metrics, busy_share), rules, None, 0.0)
        assert decision.desired == after
    if after > 1 and after < size:
        assert f"but {busy_share:.0%} of {size} is busy, which takes {after}" in decision.reason


@given(st.floats(0, 1024))
def test_the_least_size_leaves_room_for_chance(load: float) -> None:
    size = least_size(load)
    assert load <= BUSY_AT_MOST * size + 1e-6
    assert load + math.sqrt(load) <= size + 1e-6
    assert size <= 1 or max((size - 1) * BUSY_AT_MOST, 0) < load or load + load**0.5 > size - 1


def test_busy_workers_grow_no_pool() -> None:
    assert (
        decide(PoolSnapshot(2, 2, {"queue_depth": 3}, 1.0), policy(("queue_depth", 2)), None, 0.0)[
            0
        ].desired
        == 2
    )


def test_a_wish_for_more_must_last() -> None:
    rules = policy(("queue_depth", 1), up=5)
    load = {0: 1, 1: 9, 2: 9, 3: 1, 4: 9, 5: 8, 6: 9, 7: 9, 8: 9, 9: 9}
    sizes = run(
        rules, 1, lambda now, _: {"queue_depth": load[int(now)]}, [float(now) for now in range(10)]
    )
    assert sizes == [1] * 9 + [8], (
        "from second 4 on, and then the lowest recommendation of those five seconds"
    )


def test_a_late_poll_does_not_count_as_a_recommendation_that_lasted() -> None:
    rules = policy(("queue_depth", 1), up=5)
    sizes = run(rules, 1, lambda now, _: {"queue_depth": 1 if now < 60 else 9}, [0, 60, 64, 65])
    assert sizes == [1, 1, 1, 9]


def test_the_stabilisation_example_of_kep_853() -> None:
    """One look a minute, a window of ten: while a 10 is in it the size stays 10, then it becomes
    9.
    """
    recommendations = [10, 9, 8, 9, 9, 8, 9, 8, 9, 8, 7, 8, 8]
    rules = policy(("queue_depth", 1), down=600, tolerance=0)
    minutes = [60.0 * minute for minute in range(len(recommendations))]
    sizes = run(rules, 10, lambda now, _: {"queue_depth": recommendations[int(now / 60)]}, minutes)
    assert sizes == [10] * 11 + [9, 9]


def test_growth_is_limited_to_one_step_per_delay() -> None:
    rules = policy(("queue_depth", 1), up=5, steps=(2, 1))
    sizes = run(rules, 1, lambda *_: {"queue_depth": 100}, [float(now) for now in range(16)])
    assert sizes == [1] * 5 + [3] * 6 + [5] * 5


def test_an_operators_size_is_the_new_start() -> None:
    rules = policy(("queue_depth", 1), down=30)
    idle: Mapping[MetricName, float] = {"queue_depth": 0}
    _, state = decide(PoolSnapshot(1, 1, {"queue_depth": 1}), rules, None, 0.0)
    for now in (100.0, 110.0, 129.0):
        decision, state = decide(PoolSnapshot(6, 6, idle), rules, state, now)
        assert decision.desired == 6, "the old recommendation for 1 does not count against it"
    assert decide(PoolSnapshot(6, 6, idle), rules, state, 130.0)[0].desired == 0


rule_sets = st.builds(
    policy,
    st.tuples(st.just("queue_depth"), st.floats(0.1, 100)),
    st.tuples(st.just("kv_occupancy"), st.floats(0.05, 0.66)),
    up=st.sampled_from([0, 1, 5]),
    down=st.sampled_from([0, 1, 7]),
    bounds=st.tuples(st.integers(0, 3), st.integers(3, 20)),
    steps=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    tolerance=st.sampled_from([0, 0.1, 0.5]),
)
values = st.none() | st.just(math.nan) | st.floats(0, 1000)


@given(rule_sets, st.integers(0, 30), st.lists(st.tuples(values, values), min_size=1, max_size=30))
def test_always_within_bounds_and_steps(
    rules: PoolPolicy, size: int, seen: list[tuple[float | None, float | None]]
) -> None:
    state: PoolState | None = None
    for second, (depth, occupancy) in enumerate(seen):
        known: dict[MetricName, float] = {}
        if depth is not None:
            known["queue_depth"] = depth
        if occupancy is not None:
            known["kv_occupancy"] = occupancy
        decision, state = decide(PoolSnapshot(size, size, known), rules, state, float(second))
        after = decision.desired
        assert decision.reason
        assert rules.min_replicas <= after <= rules.max_replicas
        if rules.min_replicas <= size <= rules.max_replicas:
            assert -rules.max_step_down <= after - size <= rules.max_step_up
        if after < size <= rules.max_replicas:
            assert depth is not None, "never shrinks on what is not known"
            assert occupancy is not None
            assert not math.isnan(depth)
            assert not math.isnan(occupancy)
        size = after


@given(rule_sets, st.integers(0, 20), st.floats(0, 200), st.floats(0, 15))
def test_constant_load_settles_without_flapping(
    rules: PoolPolicy, size: int, queued: float, busy_workers: float
) -> None:
    """`busy_workers` workers' worth of KV: occupancy is that over the size, so it falls as the pool
    grows.
    """

    def load(_now: float, size: int) -> Mapping[MetricName, float]:
        occupancy: Mapping[MetricName, float] = (
            {"kv_occupancy": min(1.0, busy_workers / size)} if size else {}
        )
        return {"queue_depth": queued, **occupancy}

    sizes = run(rules, size, load, [float(second) for second in range(400)])
    assert len(set(sizes[200:])) == 1
    changes = [
        after - before
        for before, after in zip([size, *sizes], sizes, strict=False)
        if after != before
    ]
    turns = sum(a * b < 0 for a, b in pairwise(changes))
    assert turns <= 1, (
        "it may overshoot once when the load no longer saturates the workers, then it settles"
    )


@given(rule_sets, st.lists(st.floats(0, 500), min_size=1, max_size=200))
def test_the_memory_is_bounded_by_the_window(rules: PoolPolicy, depths: list[float]) -> None:
    state: PoolState | None = None
    for second, depth in enumerate(depths):
        _, state = decide(PoolSnapshot(5, 5, {"queue_depth": depth}), rules, state, float(second))
    assert state is not None
    assert len(state.recommendations) <= 9


@given(
    st.floats(min_value=0, max_value=1e308),
    st.floats(min_value=1e-310, max_value=1e308),
    st.floats(min_value=0, max_value=1e308),
    st.integers(0, 50),
)
def test_no_value_is_too_large(value: float, target: float, busy: float, ready: int) -> None:
    rules = policy(("queue_wait_p95_ms", target), ("queue_tokens", target), bounds=(1, 8))
    metrics = {"queue_wait_p95_ms": value, "queue_tokens": value}
    seen = PoolSnapshot(ready, ready, metrics, busy)  # type: ignore[arg-type]
    assert 0 <= decide(seen, rules, None, 0.0)[0].desired <= max(8, ready)


@pytest.mark.parametrize(("is_needed", "size"), [(True, 2), (False, 0)])
def test_an_empty_pool_that_is_needed_grows_at_once(is_needed: bool, size: int) -> None:
    rules = policy(("queue_depth", 1), bounds=(0, 4), up=10.0, steps=(2, 1))
    state: PoolState | None = None
    _, state = decide(PoolSnapshot(0, 0, {"queue_depth": 0}), rules, state, 0.0)
    seen = PoolSnapshot(0, 0, {"queue_depth": 5}, is_needed=is_needed)
    assert decide(seen, rules, state, 1.0)[0].desired == size
