"""The decision who gives way, on books of all kinds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from router.core.queueing.preemption import (
    MIN_RUN_S,
    PROGRESS_TOKENS,
    SPARED_WAIT_S,
    START_RATIO,
    TURN_S,
    Preemption,
    Room,
    Running,
    Shares,
    Standing,
    Waiting,
    preempt,
)

TENANTS = ("a", "b", "c")
SLOTS = 4


def one_running(name: str = "r", tenant: str = "a", worker: str = "d0", number: int = 1) -> Running:
    return Running(name, number, tenant, 0, worker, 100, 50, 10.0, 0.1, 0)


def shares(
    running: list[Running],
    tokens: int = 0,
    weights: tuple[float, ...] = (1, 1, 1),
    soon_s: float = math.inf,
) -> Shares:
    rooms = []
    for worker in sorted({one.worker_id for one in running}):
        there = [one for one in running if one.worker_id == worker]
        free_tokens = tokens - sum(one.held_tokens for one in there)
        rooms.append(Room(worker, len(there), 0, tokens, free_tokens, soon_s))
    counters = {"a": 900.0, "b": 100.0, "c": 500.0}
    return Shares(
        rooms,
        running,
        {
            one: Standing(weight, counters[one])
            for one, weight in zip(TENANTS, weights, strict=True)
        },
    )


def full(tenant: str = "a") -> list[Running]:
    return [one_running(str(number), tenant, number=number) for number in range(SLOTS)]


WAITING = Waiting("w", "b", 0, 10)


def victims(found: Preemption | None) -> tuple[str, ...]:
    return () if found is None else found.victims


def test_the_order_within_a_tenant() -> None:
    """Least urgent, then seldom preempted, then what is cheap to restore, then the youngest."""
    books = full()
    assert victims(preempt(WAITING, shares(books))) == ("3",)
    books[0] = replace(books[0], held_tokens=99)
    assert victims(preempt(WAITING, shares(books))) == ("0",)
    books[1] = replace(books[1], new_tokens=0)  # nothing is lost with it
    assert victims(preempt(WAITING, shares(books))) == ("1",)
    books = [replace(one, preemptions=1) for one in books[:3]] + books[3:]
    assert victims(preempt(WAITING, shares(books))) == ("3",)
    books[2] = replace(books[2], priority=1)
    assert victims(preempt(WAITING, shares(books))) == ("2",)


def test_the_reason_names_both_tenants_and_what_they_have() -> None:
    found = preempt(WAITING, shares(full()))
    assert found is not None
    assert found.why == "tenant 'a' has 4 of 4 batch slots, tenant 'b' waits with 0"


def test_who_was_preempted_stays_until_it_has_got_on() -> None:
    again = replace(
        one_running(), preemptions=1, new_tokens=PROGRESS_TOKENS, ran_s=MIN_RUN_S, start_s=0.0
    )
    slow = replace(again, start_s=MIN_RUN_S)
    for one, moves in (
        (again, True),
        (replace(again, new_tokens=PROGRESS_TOKENS - 1), False),
        (replace(again, ran_s=MIN_RUN_S * 0.99), False),
        (slow, False),
        (replace(slow, ran_s=START_RATIO * MIN_RUN_S), True),
        (replace(again, fixed=True), False),
    ):
        books = [replace(one, request_id=str(number), number=number) for number in range(SLOTS)]
        assert bool(victims(preempt(WAITING, shares(books)))) == moves, one


def test_a_slot_that_comes_free_soon_is_waited_for() -> None:
    assert preempt(WAITING, shares(full(), soon_s=0.1)) is None
    assert preempt(WAITING, shares(full(), soon_s=0.11)) is not None


def test_a_restart_that_takes_long_is_not_spared_by_a_long_wait() -> None:
    slow = [replace(one, start_s=30.0) for one in full()]
    assert preempt(WAITING, shares(slow, soon_s=SPARED_WAIT_S)) is None
    assert preempt(WAITING, shares(slow, soon_s=SPARED_WAIT_S + 0.01)) is not None


def test_one_slot_is_taken_in_turns_by_who_was_served_less() -> None:
    alone = [
        replace(one_running(str(number), "ac"[number % 2], number=number), ran_s=TURN_S)
        for number in range(2)
    ]
    room = [Room("d0", 2, 0, 0, 0)]
    standings = shares(full()).tenants
    found = preempt(WAITING, Shares(room, alone, standings))
    assert victims(found) in {("0",), ("1",)}
    early = [replace(one, ran_s=TURN_S * 0.99) for one in alone]
    assert preempt(WAITING, Shares(room, early, standings)) is None
    served_more = {**standings, "b": Standing(1.0, 1e9)}
    assert preempt(WAITING, Shares(room, alone, served_more)) is None


RUNNING = st.builds(
    Running,
    request_id=st.just(""),
    number=st.integers(0, 50),
    tenant=st.sampled_from(TENANTS),
    priority=st.integers(-1, 1),
    worker_id=st.sampled_from(("d0", "d1")),
    held_tokens=st.integers(1, 100),
    new_tokens=st.integers(0, 40),
    ran_s=st.floats(0, 10),
    start_s=st.none() | st.floats(0, 2),
    preemptions=st.integers(0, 3),
)
WEIGHTS = st.tuples(*[st.sampled_from((0.5, 1.0, 2.0, 10.0))] * 3)


@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(RUNNING, min_size=1, max_size=8),
    st.sampled_from(TENANTS),
    st.integers(-1, 1),
    st.integers(1, 200),
    st.sampled_from((0, 300)),
    WEIGHTS,
)
def test_whatever_the_books_say(
    running: list[Running],
    tenant: str,
    priority: int,
    num_tokens: int,
    tokens: int,
    weights: tuple[float, ...],
) -> None:
    running = [replace(one, request_id=str(number)) for number, one in enumerate(running)]
    waiting = Waiting("w", tenant, priority, num_tokens)
    books = shares(running, tokens, weights)
    found = preempt(waiting, books)
    assume(found is not None)
    assert found is not None
    chosen = [one for one in running if one.request_id in found.victims]
    assert len(chosen) == len(set(found.victims)) > 0
    for one in chosen:
        assert (one.tenant != tenant, one.worker_id, one.priority >= priority) == (
            True,
            found.worker_id,
            True,
        )
    (room,) = [one for one in books.rooms if one.worker_id == found.worker_id]
    freed = sum(one.held_tokens for one in chosen)
    assert room.free_slots + len(chosen) >= 1
    assert not tokens or room.free_tokens + freed >= num_tokens, "there is room then"
    least = min(chosen, key=lambda one: one.held_tokens)
    assert (
        room.free_slots + len(chosen) - 1 < 1
        or room.free_tokens + freed - least.held_tokens < num_tokens
    )
    _is_not_reversed(chosen, running, waiting, tokens, weights, found.worker_id)


def _is_not_reversed(
    chosen: list[Running],
    running: list[Running],
    waiting: Waiting,
    tokens: int,
    weights: tuple[float, ...],
    worker: str,
) -> None:
    """The victims find nobody of the tenant that took their place to give way to them, but in
    turns.
    """
    successor = replace(
        one_running("w", waiting.tenant, worker), held_tokens=waiting.num_tokens, ran_s=0.0
    )
    after = [one for one in running if one not in chosen] + [successor]
    for one in chosen:
        if shares(running, tokens, weights).slots_of(one.tenant) == 1:
            continue  # it took turns
        back = Waiting(
            one.request_id, one.tenant, min(one.priority, waiting.priority), one.held_tokens
        )
        found = preempt(back, shares(after, tokens, weights))
        assert found is None or "w" not in found.victims


@given(st.lists(RUNNING, min_size=1, max_size=8), st.sampled_from(TENANTS), st.integers(1, 200))
def test_one_tenant_never_preempts_itself(
    running: list[Running], tenant: str, num_tokens: int
) -> None:
    mine = [
        replace(one, request_id=str(number), tenant=tenant) for number, one in enumerate(running)
    ]
    assert preempt(Waiting("w", tenant, -9, num_tokens), shares(mine, 300)) is None


@pytest.mark.parametrize("weight", [1.0, 3.0, 30.0])
def test_moves_end_where_shares_are_met(weight: float) -> None:
    """From a batch that one tenant fills to weighted shares, in as many moves as there are slots to
    move.
    """
    running = [replace(one_running(str(number), "a", number=number)) for number in range(32)]
    room = [Room("d0", 32, 0, 0, 0)]
    standings = {"a": Standing(1.0, 0.0), "b": Standing(weight, 0.0)}
    for number in range(32, 80):
        found = preempt(Waiting(str(number), "b", 0, 100), Shares(room, running, standings))
        if found is None:
            break
        (gone,) = found.victims
        running = [one for one in running if one.request_id != gone]
        running.append(one_running(str(number), "b", number=number))
    held = sum(one.tenant == "b" for one in running)
    assert abs(held - 32 * weight / (1 + weight)) <= 1
