from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.tenants import Tenant
from router.core.queueing.fair_queue import FairQueue, Share, Ticket

TENANTS = {"a": Tenant("a"), "b": Tenant("b", weight=3.0), "c": Tenant("c", max_running=2)}


def waits(request_id: str) -> bool:
    return request_id.endswith("paused")


def busy(_tenant: str) -> bool:
    return False


class Filled:
    """A queue, with requests that are added and served by name; those that are served end at once,
    or never.
    """

    def __init__(self, end: bool = True) -> None:
        self.queue = FairQueue()
        self.end = end
        self.numbers = count(1)

    def add(
        self, tenant: Tenant, requests: int = 1, priority: int = 0, tokens: int = 100
    ) -> list[str]:
        share = self.queue.share(tenant)
        names = []
        for _ in range(requests):
            number = next(self.numbers)
            names.append(f"{tenant.name}{number}")
            self.queue.add(Ticket(number, names[-1], priority, tokens), share, returned=False)
        return names

    def serve(self, answer_tokens: int = 0) -> str | None:
        """The next one; it is charged with its prompt and its answer."""
        ticket = self.queue.next(waits, busy)
        if ticket is None:
            return None
        share = self.queue._where[ticket.request_id][1]
        self.queue.serve(ticket)
        share.running += not self.end
        share.charge(ticket.tokens + answer_tokens)
        return ticket.request_id

    def served(self, number: int) -> Counter[str]:
        return Counter((self.serve() or "?")[0] for _ in range(number))


def test_tenants_that_wait_are_served_by_weight() -> None:
    filled = Filled()
    filled.add(Tenant("a"), 100)
    filled.add(Tenant("b", weight=3.0), 100)
    served = filled.served(40)
    assert (served["a"], served["b"]) == (10, 30)


def test_tokens_count_and_not_requests() -> None:
    filled = Filled()
    filled.add(Tenant("a"), 100, tokens=300)
    filled.add(Tenant("b"), 100, tokens=100)
    served = filled.served(40)
    assert (served["a"], served["b"]) == (10, 30)


def test_answers_count_as_prompts_do() -> None:
    filled = Filled()
    filled.add(Tenant("a"), 100)
    filled.add(Tenant("b"), 100)
    order = Counter()
    for _ in range(40):
        ticket = filled.queue.next(waits, busy)
        assert ticket is not None
        name = ticket.request_id[0]
        filled.serve(answer_tokens=200 if name == "a" else 0)
        order[name] += 1
    assert (order["a"], order["b"]) == (10, 30)


def test_a_tenant_takes_no_slot_that_it_would_have_to_give_back() -> None:
    """However few tokens it was served: another that waits would be below its share of slots."""
    filled = Filled(end=False)
    filled.add(Tenant("a"), 100)
    filled.add(Tenant("b", weight=3.0), 100)
    filled.queue.share(Tenant("b", weight=3.0)).charge(10**6)
    order = [(filled.serve() or "?")[0] for _ in range(40)]
    for length in range(4, 41):
        assert abs(order[:length].count("a") - length / 4) <= 1
    filled.queue.share(Tenant("b", weight=3.0)).running = 0
    assert {(filled.serve() or "?")[0] for _ in range(20)} == {"b"}


def test_idle_time_earns_no_credit() -> None:
    filled = Filled()
    filled.add(Tenant("a"), 200)
    filled.served(100)
    filled.add(Tenant("b"), 100)
    assert filled.served(20)["b"] == 10, "it begins where the others are"


def test_priorities_are_strict_and_a_tenant_is_first_come_first_served() -> None:
    filled = Filled()
    late = filled.add(Tenant("a"), 2, priority=1)
    first = filled.add(Tenant("b"), 2, priority=0)
    urgent = filled.add(Tenant("a"), 1, priority=-5)
    assert [filled.serve() for _ in range(6)] == [*urgent, *first, *late, None]


def test_requests_that_lost_their_workers_go_first_in_their_priority() -> None:
    filled = Filled()
    (urgent,) = filled.add(Tenant("a"), priority=-1)
    waiting = filled.add(Tenant("a"), 2)
    share = filled.queue.share(Tenant("b"))
    share.charge(10**6)
    for number, name in ((50, "late"), (40, "early")):
        filled.queue.add(Ticket(number, name, 0, 10), share, returned=True)
    assert [filled.serve() for _ in range(5)] == [urgent, "early", "late", *waiting]


def test_who_was_preempted_goes_first_among_its_tenants_only() -> None:
    filled = Filled()
    waiting = filled.add(Tenant("a"), 2)
    (other,) = filled.add(Tenant("b"))
    share = filled.queue.share(Tenant("a"))
    share.charge(100)
    for number, name in ((-1, "late"), (-3, "early"), (-2, "later")):
        filled.queue.add(Ticket(number, name, 0, 10), share, returned=False, preempted=True)
    assert [filled.serve() for _ in range(6)] == [other, "early", "later", "late", *waiting]


def test_who_was_preempted_is_not_sent_away() -> None:
    filled = Filled()
    share, other = filled.queue.share(Tenant("a")), filled.queue.share(Tenant("b"))
    for number in range(3):
        filled.queue.add(
            Ticket(-number, f"stream{number}", 0, 10), share, returned=False, preempted=True
        )
    assert filled.queue.overflow(other, 0) is None
    (new,) = filled.add(Tenant("a"))
    assert filled.queue.overflow(other, 0) == new
    assert new not in filled.queue._preempted


def test_heads_are_those_for_whom_others_may_give_way() -> None:
    filled = Filled()
    first, _ = filled.add(Tenant("a"), 2)
    (light,) = filled.add(Tenant("b", weight=3.0))
    filled.add(Tenant("d"), priority=1)
    filled.add(TENANTS["c"])
    assert filled.queue.heads(waits, busy) == [], "nobody has workers"
    filled.queue.share(TENANTS["c"]).running = 2  # as many as it may
    filled.queue.share(Tenant("a")).running = 1
    filled.queue.share(Tenant("b", weight=3.0)).running = 2
    assert [one.request_id for one in filled.queue.heads(waits, busy)] == [light, first]
    filled.queue.share(TENANTS["c"]).running = 0
    filled.queue.share(Tenant("b", weight=3.0)).running = 0
    assert first not in [one.request_id for one in filled.queue.heads(waits, busy)], (
        "it alone has workers"
    )


def test_a_tenant_has_no_more_workers_at_one_time_than_it_may() -> None:
    filled = Filled(end=False)
    capped = filled.add(TENANTS["c"], 4)
    (other,) = filled.add(Tenant("z"))
    assert [filled.serve() for _ in range(4)] == [capped[0], other, capped[1], None]
    filled.queue.share(TENANTS["c"]).running -= 1
    assert filled.serve() == capped[2]


def calls(work: Callable[[], object]) -> int:
    """The functions that `work` calls, those written in C among them."""
    seen = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_a_capped_tenants_priorities_cost_others_nothing() -> None:
    few, many = Filled(end=False), Filled(end=False)
    for filled, priorities in ((few, 4), (many, 400)):
        filled.add(Tenant("z"))
        filled.serve()
        for priority in range(priorities):
            filled.add(TENANTS["c"], priority=priority)
        filled.queue.share(TENANTS["c"]).running = 2
    for work in (
        lambda queue: queue.next(waits, busy),
        lambda queue: queue.heads(waits, busy),
        lambda queue: queue.overflow(queue.share(Tenant("z")), 0),
    ):
        assert calls(partial(work, few.queue)) == calls(partial(work, many.queue))


def test_a_paused_request_holds_up_nobody() -> None:
    filled = Filled()
    share = filled.queue.share(Tenant("a"))
    filled.queue.add(Ticket(1, "paused", 0, 10), share, returned=True)
    (new,) = filled.add(Tenant("a"))
    assert [filled.serve(), filled.serve()] == [new, None]


def test_a_tenant_alone_may_fill_the_queue_and_gives_way_when_others_come() -> None:
    filled = Filled()
    names = filled.add(Tenant("a"), 8)
    assert filled.queue.overflow(filled.queue.share(Tenant("a")), 0) is None
    for _ in range(4):
        displaced = filled.queue.overflow(filled.queue.share(Tenant("b")), 0)
        assert displaced == names.pop()
        filled.queue.remove(displaced)
        filled.add(Tenant("b"))
    assert filled.queue.overflow(filled.queue.share(Tenant("b")), 0) is None, "it has its half now"


def test_within_a_tenant_the_least_urgent_gives_way() -> None:
    filled = Filled()
    filled.add(Tenant("a"), 2, priority=0)
    _, newest = filled.add(Tenant("a"), 2, priority=7)
    share = filled.queue.share(Tenant("a"))
    assert filled.queue.overflow(share, 0) == newest
    assert filled.queue.overflow(share, 7) is None
    assert filled.queue.overflow(share, 8) is None


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1)), max_size=40),
    st.sampled_from("ab"),
    st.integers(0, 1),
)
def test_estimate_of_those_ahead_is_what_comes_before(
    waiting: list[tuple[str, int]], tenant: str, priority: int
) -> None:
    """Where all requests are alike, up to one for each other tenant."""
    filled = Filled()
    for name, level in waiting:
        filled.add(TENANTS[name], priority=level)
    estimate = filled.queue.ahead(filled.queue.share(TENANTS[tenant]), priority, 100.0)
    (mine,) = filled.add(TENANTS[tenant], priority=priority)
    before = 0
    while filled.serve() != mine:
        before += 1
    assert abs(estimate - before) <= 1


@dataclass
class Naive:
    number: int
    name: str
    tenant: str
    priority: int
    tokens: int
    returned: bool


class FairQueueMachine(RuleBasedStateMachine):
    """Against a list that is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Naive] = []
        self.running: list[Naive] = []
        self.counters: dict[str, float] = dict.fromkeys(TENANTS, 0.0)
        self.virtual_time = 0.0
        self.numbers = count(1)

    def share(self, tenant: str) -> Share:
        return self.queue.share(TENANTS[tenant])

    def put(self, one: Naive) -> None:
        if not any(other.tenant == one.tenant for other in self.waiting):
            self.counters[one.tenant] = max(self.counters[one.tenant], self.virtual_time)
        self.waiting.append(one)
        self.queue.add(
            Ticket(one.number, one.name, one.priority, one.tokens),
            self.share(one.tenant),
            one.returned,
        )

    def expected(self) -> Naive | None:
        running = Counter(one.tenant for one in self.running)
        caps = {name: tenant.max_running for name, tenant in TENANTS.items()}
        free = [
            one
            for one in self.waiting
            if caps[one.tenant] is None or running[one.tenant] < (caps[one.tenant] or 0)
        ]
        free = [one for one in free if not (one.returned and waits(one.name))]
        level = min((one.priority for one in free), default=0)
        returned = [one for one in free if one.returned and one.priority == level]
        if returned:
            return min(returned, key=lambda one: one.number)
        new = [one for one in free if one.priority == level]

        def held(tenant: str, more: int = 0) -> float:
            return (running[tenant] + more) / TENANTS[tenant].weight

        least = min((held(one.tenant, 1) for one in new), default=0.0)
        new = [one for one in new if held(one.tenant) < least]
        return min(new, key=lambda one: (self.counters[one.tenant], one.number), default=None)

    @rule(
        tenant=st.sampled_from(sorted(TENANTS)),
        priority=st.integers(-1, 1),
        tokens=st.integers(1, 100),
    )
    def come(self, tenant: str, priority: int, tokens: int) -> None:
        number = next(self.numbers)
        self.put(Naive(number, f"{tenant}{number}", tenant, priority, tokens, returned=False))

    @rule(answer=st.integers(0, 50))
    def serve(self, answer: int) -> None:
        expected = self.expected()
        ticket = self.queue.next(waits, busy)
        assert (ticket and ticket.request_id) == (expected and expected.name)
        if ticket is None or expected is None:
            return
        self.virtual_time = max(self.virtual_time, self.counters[expected.tenant])
        self.queue.serve(ticket)
        share = self.share(expected.tenant)
        share.running += 1
        share.charge(expected.tokens + answer)
        self.counters[expected.tenant] += (expected.tokens + answer) / TENANTS[
            expected.tenant
        ].weight
        self.waiting.remove(expected)
        self.running.append(expected)

    @rule(data=st.data(), lost=st.booleans(), paused=st.booleans())
    def end(self, data: st.DataObject, lost: bool, paused: bool) -> None:
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.share(one.tenant).running -= 1
        if lost:
            name = f"{one.name}-paused" if paused else one.name
            self.put(Naive(one.number, name, one.tenant, one.priority, one.tokens, returned=True))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            one = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(one)
            self.queue.remove(one.name)
            self.queue.remove(one.name)

    @invariant()
    def same(self) -> None:
        assert set(self.queue) == {one.name for one in self.waiting}
        assert len(self.queue) == len(self.waiting)
        assert self.queue.tokens == sum(one.tokens for one in self.waiting)


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
