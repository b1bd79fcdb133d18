"""Order, lanes and budgets between tenants: pure, in virtual time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant
from router.core.body_budget import BodyBudget, Holding
from router.core.queueing.fair_order import FairOrder
from router.core.queueing.short_job_lanes import Lanes

HOSTILE, GUEST, LARGE = Tenant("hostile"), Tenant("guest"), Tenant("large", weight=3.0)


def served(order: FairOrder[tuple[str, float]], cost: float) -> list[str]:
    """Whose jobs are done, in their order, until so much work is done."""
    done: list[str] = []
    while cost > 0 and (found := order.first()) is not None:
        number, (name, each) = found
        order.charge(number, each)
        order.remove(number)
        done.append(name)
        cost -= each
    return done


def test_a_tenant_waits_for_one_job_of_another_not_for_its_line() -> None:
    order: FairOrder[tuple[str, float]] = FairOrder()
    for _ in range(1000):
        order.add(HOSTILE, ("hostile", 4e6))
    assert served(order, 40e6) == ["hostile"] * 10
    order.add(GUEST, ("guest", 100.0))
    order.add(GUEST, ("guest", 100.0))
    assert served(order, 12e6).count("guest") == 2


def test_work_is_shared_by_weight() -> None:
    order: FairOrder[tuple[str, float]] = FairOrder()
    for _ in range(1000):
        order.add(LARGE, ("large", 10.0))
        order.add(GUEST, ("guest", 10.0))
    counts = Counter(served(order, 4000.0))
    assert counts["large"] == pytest.approx(3 * counts["guest"], rel=0.05)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100)), min_size=1, max_size=60))
def test_tenants_that_wait_all_the_time_differ_by_a_job_at_most(
    jobs: list[tuple[str, int]],
) -> None:
    order: FairOrder[tuple[str, float]] = FairOrder()
    tenants = {name: Tenant(name) for name in "abcd"}
    for name, cost in jobs:
        order.add(tenants[name], (name, float(cost)))
    left = Counter(name for name, _ in jobs)
    done: Counter[str] = Counter()
    while (found := order.first()) is not None:
        number, (name, cost) = found
        order.charge(number, cost)
        order.remove(number)
        left[name] -= 1
        done[name] += int(cost)
        waiting = [one for one in left if left[one]]
        if len(waiting) == len({name for name, _ in jobs}):
            assert max(done[one] for one in waiting) - min(done[one] for one in waiting) <= 2 * 100
    assert not len(order)
    assert len(order._lines) <= 20  # who is gone is forgotten


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=80), st.integers(1, 4))
def test_long_jobs_leave_a_lane_to_short_ones(steps: list[tuple[bool, bool]], lanes: int) -> None:
    pool: Lanes[bool] = Lanes(lanes, short=10.0)
    running: dict[int, bool] = {}
    waiting: set[int] = set()
    for long, end in steps:
        if end and running:
            number = next(iter(running))
            del running[number]
            pool.end(number)
        else:
            waiting.add(pool.add(HOSTILE, long, 100.0 if long else 1.0))
        while (started := pool.start()) is not None:
            number, what = started
            waiting.remove(number)
            running[number] = what
        assert len(running) <= lanes
        assert sum(running.values()) <= max(1, lanes - 1)
        assert len(pool) == len(waiting)
        if waiting and lanes > 1:
            assert len(running) == lanes or sum(running.values()) == lanes - 1, (
                "a lane is free for who waits"
            )


def test_a_job_that_is_not_wanted_any_more_leaves_the_line() -> None:
    pool: Lanes[str] = Lanes(1, short=10.0)
    first, second = pool.add(HOSTILE, "first", 1.0), pool.add(HOSTILE, "second", 1.0)
    third = pool.add(GUEST, "third", 1.0)
    assert pool.start() == (first, "first")
    pool.end(second)
    pool.end(first)
    pool.end(first)
    assert pool.start() == (third, "third")
    assert pool.start() is None


class Upload:
    """One body on its way."""

    def __init__(self, budget: BodyBudget, tenant: Tenant) -> None:
        self.evicted = False
        self._context = budget.holding(tenant, self._evict)
        self.budget = budget
        self.holding: Holding = self._context.__enter__()

    def _evict(self) -> None:
        self.evicted = True

    def grow(self, amount: int) -> bool:
        try:
            self.budget.grow(self.holding, amount)
        except ResourceExhausted:
            self.end()
            return False
        return True

    def end(self) -> None:
        self._context.__exit__(None, None, None)


def test_slow_uploads_of_one_tenant_do_not_keep_others_out() -> None:
    budget = BodyBudget(64 * 4, "bytes")
    hostile = [Upload(budget, HOSTILE) for _ in range(64)]
    assert all(one.grow(4) for one in hostile), "a tenant alone may use it all"
    assert not Upload(budget, HOSTILE).grow(4), "and no more"
    guests = [Upload(budget, GUEST) for _ in range(32)]
    assert all(one.grow(4) for one in guests)
    assert [one.evicted for one in hostile] == [False] * 32 + [True] * 32, "its newest give way"
    assert not Upload(budget, GUEST).grow(8), "nobody gets more than its share from others"
    large = [Upload(budget, LARGE) for _ in range(38)]
    assert all(one.grow(4) for one in large), "three times the share"
    for one in (*hostile, *guests, *large):
        one.end()
    assert budget.held == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from([HOSTILE, GUEST, LARGE]),
            st.integers(0, 6),
            st.integers(0, 40),
            st.booleans(),
        ),
        max_size=80,
    )
)
def test_the_budget_is_never_exceeded_and_a_share_is_never_refused(
    steps: list[tuple[Tenant, int, int, bool]],
) -> None:
    total = 100
    budget = BodyBudget(total, "bytes")
    live: dict[tuple[str, int], Upload] = {}
    for tenant, index, amount, end in steps:
        key = tenant.name, index
        upload = live.setdefault(key, Upload(budget, tenant))
        if end:
            live.pop(key).end()
        else:
            gone = upload.evicted
            held = sum(one.holding.size for (name, _), one in live.items() if name == tenant.name)
            active = {one.weight for one in (HOSTILE, GUEST, LARGE)}
            if not upload.grow(amount):
                del live[key]
                share = total * tenant.weight / (sum(active) + 1)  # two tenants have the weight 1
                assert gone or held + amount > share, "its share is each tenant's"
        assert budget.held == sum(one.holding.size for one in live.values()) <= total
    for one in live.values():
        one.end()
    assert budget.held == 0
