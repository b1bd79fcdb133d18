from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.workers import PoolName
from router.core.workers.circuit_breaker import FORGET_S, Breaker
from router.core.workers.latency_outliers import FACTOR, NOTICEABLE_S, Typical, times_slower
from router.core.workers.link_health import OPEN_S as LINK_OPEN_S
from router.core.workers.link_health import LinkHealth
from router.core.workers.worker_health import (
    EJECT_S,
    FAILURES,
    MOST,
    OPEN_S,
    PROBE_SAMPLES,
    SAMPLES,
    Health,
)


def health(*workers: str, pool: PoolName = "decode") -> Health:
    made = Health()
    for one in workers:
        made.found(one, pool)
    return made


def test_breaker_lets_one_probe_through_when_its_time_is_over() -> None:
    breaker = Breaker(1.0, 60.0)
    assert breaker.open("it fails", 10.0) == 1.0
    assert not breaker.passes(10.9)
    assert breaker.passes(11.0)
    breaker.passed(11.0)
    assert not breaker.passes(11.9), "the probe is on its way"
    assert breaker.passes(12.0), "and came to nothing"
    breaker.close(12.5)
    assert breaker.passes(12.5)


def test_breaker_stays_open_for_twice_as_long_each_time_up_to_a_bound() -> None:
    breaker = Breaker(1.0, 10.0)
    assert [breaker.open("it fails", float(one)) for one in range(6)] == [1, 2, 4, 8, 10, 10]
    breaker.close(10.0)
    assert breaker.open("again", 11.0) == 10, "it was well for a moment only"
    breaker.close(12.0)
    assert breaker.open("after long", 12.0 + FORGET_S) == 1


def test_failures_in_a_row_open_it_and_a_later_success_closes_it() -> None:
    made = health("d0")
    now = 0.0
    for number in range(FAILURES):
        assert made.fit("d0", now)
        now = float(number + 1)
        text = made.failed("d0", now - 0.5, "INTERNAL: broken", now)
    assert (
        text
        == f"gets no new work for {OPEN_S[0]:g} s after {FAILURES} failures in a row: INTERNAL: "
        f"broken"
    )
    assert not made.fit("d0", now)
    assert made.succeeded("d0", now - 0.1, now) == "", "it began before the last failure"
    assert made.fit("d0", now + OPEN_S[0])
    assert (
        made.succeeded("d0", now + 1.0, now + 2.0) == "gets new work again, since a probe went well"
    )
    assert made.fit("d0", now + 2.0)
    assert made.sick() == []


def test_a_success_between_failures_begins_the_count_anew() -> None:
    made = health("d0")
    for number in range(10):
        assert made.failed("d0", number + 0.1, "broken", number + 0.2) == ""
        made.succeeded("d0", number + 0.3, number + 0.4)


def test_attempts_that_fail_together_are_one_failure() -> None:
    made = health("d0")
    for _ in range(10 * FAILURES):
        assert made.failed("d0", 1.0, "broken", 2.0) == ""


def test_losses_are_remembered_under_the_workers_id() -> None:
    made = health("d0")
    for number in range(FAILURES):
        made.lost("d0")
        made.failed("d0", float(number), "it was lost", number + 0.5)
        made.found("d0", "decode")
    assert not made.fit("d0", FAILURES - 0.5)
    assert [one.worker_id for one in made.sick()] == ["d0"]
    made.lost("d0")
    assert made.sick() == []


def test_workers_that_are_gone_do_not_fill_memory() -> None:
    made = health()
    for number in range(2 * MOST):
        made.found(f"d{number}", "decode")
        made.lost(f"d{number}")
    assert len(made._patients) == MOST


def test_the_failures_of_the_workers_that_were_lost_last_are_remembered() -> None:
    made = health("first seen", *(f"d{number}" for number in range(MOST)))
    for number in range(MOST):
        made.lost(f"d{number}")
    made.failed("first seen", 1.0, "it was lost", 2.0)
    made.lost("first seen")
    made.found("first seen", "decode")
    assert made.troubled("first seen")
    assert "d0" not in made._patients


def slow_one(made: Health, worker_id: str, others: list[str], now: float) -> list[tuple[str, str]]:
    for _ in range(SAMPLES["decode"]):
        made.worked(worker_id, 4, 0.5, now)
        for one in others:
            made.worked(one, 4, 0.05, now)
    return made.judge(now)


@pytest.mark.parametrize(("others", "ejected"), [([], 0), (["d1"], 1), (["d1", "d2"], 1)])
def test_who_is_much_slower_than_the_others_is_ejected(others: list[str], ejected: int) -> None:
    made = health("d0", *others)
    news = slow_one(made, "d0", others, 1.0)
    assert len(news) == ejected
    assert made.fit("d0", 1.0) == (not ejected)
    assert all(made.fit(one, 1.0) for one in others)
    if ejected:
        text = (
            f"gets no new work for {EJECT_S[0]:g} s: 10.0 times as slow as the median of the "
            f"pool's others"
        )
        assert news == [("d0", text)]


def test_a_verdict_on_an_ejected_worker_waits_for_a_probe_and_what_came_before_does_not_count() -> (
    None
):
    made = health("d0", "d1")
    slow_one(made, "d0", ["d1"], 1.0)
    assert slow_one(made, "d0", ["d1"], 3.0) == [], "the streams that it still has are no probe"
    made.placed("d0", 7.0)
    for _ in range(PROBE_SAMPLES["decode"]):
        made.worked("d0", 1, 0.05, 8.0)
        made.worked("d1", 1, 0.05, 8.0)
    assert made.judge(8.0) == [("d0", "gets new work again, since it is as fast as the others")]
    assert made.fit("d0", 8.0)


def test_a_probe_that_is_slow_ejects_for_twice_as_long() -> None:
    made = health("d0", "d1")
    slow_one(made, "d0", ["d1"], 1.0)
    made.placed("d0", 7.0)
    ((_, news),) = slow_one(made, "d0", ["d1"], 8.0)
    assert f"for {2 * EJECT_S[0]:g} s" in news


def test_no_more_than_half_of_a_pool_is_ejected() -> None:
    made = health("d0", "d1", "d2", "d3", "d4")
    for _ in range(SAMPLES["decode"]):
        for one, seconds in zip(
            ("d0", "d1", "d2", "d3", "d4"), (0.9, 0.9, 0.01, 0.01, 0.01), strict=True
        ):
            made.worked(one, 4, seconds, 1.0)
    assert [one for one, _ in made.judge(1.0)] == ["d0", "d1"]
    for _ in range(SAMPLES["decode"]):
        for one, seconds in (("d2", 0.9), ("d3", 0.01), ("d4", 0.01)):
            for _ in range(2):
                made.worked(one, 4, seconds, 2.5)
    assert made.judge(2.5) == []


def test_pools_are_not_compared_with_each_other() -> None:
    made = health("d0", "d1")
    made.found("p0", "prefill")
    for _ in range(SAMPLES["decode"]):
        made.worked("p0", 100, 3.0, 1.0)
        for one in ("d0", "d1"):
            made.worked(one, 4, 0.05, 1.0)
    assert made.judge(1.0) == []


def test_a_pair_is_tried_again_after_a_growing_time() -> None:
    links = LinkHealth()
    assert links.failed("p0", "d0", 0.0, "no way", 1.0) == LINK_OPEN_S[0]
    assert links.failed("p0", "d0", 0.5, "no way", 1.1) is None, "it was on its way already"
    assert links.broken(2.0) == {("p0", "d0")}
    assert links.broken(1.0 + LINK_OPEN_S[0]) == frozenset()
    links.used("p0", "d0", 7.0)
    assert links.broken(7.1) == {("p0", "d0")}, "one at a time"
    assert links.failed("p0", "d0", 7.0, "no way", 8.0) == 2 * LINK_OPEN_S[0]
    links.worked("p0", "d0")
    assert links.broken(8.0) == frozenset()


def test_a_worker_that_came_anew_is_reached_another_way() -> None:
    links = LinkHealth()
    links.failed("p0", "d0", 0.0, "no way", 1.0)
    links.failed("p1", "d1", 0.0, "no way", 1.0)
    links.forget("d0")
    assert links.broken(1.0) == {("p1", "d1")}


sizes = st.integers(1, 64)


@given(
    st.lists(st.tuples(sizes, st.floats(0.2, 1.0)), min_size=2, max_size=8), st.floats(0.001, 1.0)
)
def test_no_worker_is_slow_for_its_load(workers: list[tuple[int, float]], seconds: float) -> None:
    """Whatever part of the time grows with the load, as long as none of them is FACTOR times as
    slow by itself.
    """

    def typical(size: int, fixed: float) -> Typical:
        return Typical(size, seconds * (fixed + (1 - fixed) * size))

    (size, fixed), *others = workers
    one = typical(size, fixed)
    assert times_slower(one, [typical(other, fixed) for other, _ in others]) is None


@given(sizes, st.lists(sizes, min_size=1, max_size=5))
def test_a_slow_one_is_seen_under_the_same_load_or_less(size: int, more: list[int]) -> None:
    slow = Typical(size, 10 * 0.1)
    assert times_slower(slow, [Typical(size + other - 1, 0.1) for other in more]) == pytest.approx(
        10
    )


def test_what_nobody_feels_is_not_slow() -> None:
    assert times_slower(Typical(1, NOTICEABLE_S), [Typical(1, NOTICEABLE_S / FACTOR / 2)]) is None
    assert times_slower(Typical(1, 1.0), []) is None
