"""The checkers find what was put wrong into a history, and nothing in one that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from faults.checkers import CHECKERS, DEADLINE_SLACK_S, Invariant, Violation, check
from faults.history import (
    BrokeOff,
    Called,
    Case,
    Ended,
    Evidence,
    FaultRecord,
    Received,
    RequestHistory,
    WorkerSample,
)


def answered(name: str, *token_ids: int) -> RequestHistory:
    """An answer that began at 10 s and came over two calls."""
    events = [
        Called(10.0),
        Received(10.1, 0, token_ids[:1]),
        BrokeOff(10.2, "UNAVAILABLE"),
        Called(10.2, resume=1),
        Received(10.3, 1, token_ids[1:3]),
        Received(10.4, 3, token_ids[3:]),
        Ended(10.5, "length"),
    ]
    return RequestHistory(name, expected=token_ids, deadline_s=20.0, events=events)


def sample(worker_id: str, at: float, held: int = 0) -> WorkerSample:
    return WorkerSample(
        at,
        worker_id,
        pid=100,
        epoch=1,
        busy=bool(held),
        blocks_total=8,
        blocks_held=held,
        blocks_cached=3,
    )


def faultless() -> Case:
    return Case(
        lease_s=4.0,
        requests=[answered("a", 5, 6, 7, 8, 9)],
        bystanders=[answered("b", 1, 2, 3, 4)],
        faults=[FaultRecord("SIGKILL", frozenset({"decode-0"}), [Evidence(10.2, "wait status 9")])],
        before=[sample("prefill-0", 9.0), sample("decode-0", 9.0)],
        after=[
            sample("prefill-0", 10.6, held=2),
            sample("prefill-0", 11.0),
            sample("decode-1", 11.0),
        ],
    )


def test_a_right_history_passes_all_of_them() -> None:
    check(faultless(), *Invariant)
    assert set(CHECKERS) == set(Invariant)


def tokens(case: Case, number: int, **changes: object) -> None:
    """Changes a response of the request."""
    events = case.requests[0].events
    events[number] = replace(events[number], **changes)  # type: ignore[arg-type]


def lost(case: Case) -> None:
    del case.requests[0].events[4]


def lost_at_the_end(case: Case) -> None:
    del case.requests[0].events[5]


def doubled(case: Case) -> None:
    case.requests[0].events.insert(5, Received(10.35, 2, (7,)))


def swapped(case: Case) -> None:
    events = case.requests[0].events
    events[4], events[5] = events[5], events[4]


def wrong(case: Case) -> None:
    tokens(case, 4, token_ids=(6, 70))


def wrong_in_a_part(case: Case) -> None:
    """Of an answer that was not finished."""
    wrong(case)
    case.requests[0].events[-1] = Ended(10.5, "CANCELLED")


def nothing_to_compare(case: Case) -> None:
    for one in case.everyone:
        one.expected = None


def two_ends(case: Case) -> None:
    case.requests[0].events.append(Ended(10.6, "CANCELLED"))


def no_end(case: Case) -> None:
    case.bystanders[0].events.pop()


def tokens_after_the_end(case: Case) -> None:
    case.requests[0].events.append(Received(10.6, 5, (4,)))


def after_the_deadline(case: Case) -> None:
    case.requests[0].events[-1] = Ended(30.1 + DEADLINE_SLACK_S, "DEADLINE_EXCEEDED")
    case.after = [replace(one, at=one.at + 30) for one in case.after]


def nobody_was_limited(case: Case) -> None:
    for one in case.everyone:
        one.deadline_s = None


def blocks_missing(case: Case) -> None:
    case.after.append(sample("prefill-0", 11.5, held=1))


def blocks_late(case: Case) -> None:
    held = [sample("prefill-0", 10.6 + number / 50, held=2) for number in range(200)]
    case.after[:2] = [*held, sample("prefill-0", 14.6)]


def blocks_unaccounted(case: Case) -> None:
    case.after[2] = replace(case.after[2], integrity_error="block 3 is in no list")


def nobody_looked(case: Case) -> None:
    case.before = case.after = []


def a_bystander_failed(case: Case) -> None:
    case.bystanders[0].events[-1] = Ended(10.5, "UNAVAILABLE")


def a_bystanders_worker_came_anew(case: Case) -> None:
    case.after[1] = replace(case.after[1], epoch=2)


def a_worker_is_gone(case: Case) -> None:
    case.before.append(sample("decode-7", 9.0))


def anothers_answer(case: Case) -> None:
    """The whole of it."""
    case.requests[0].events = case.bystanders[0].events


def all_alike(case: Case) -> None:
    case.bystanders = [answered("b", 5, 6, 7, 8, 9)]


def an_injector_that_did_nothing(case: Case) -> None:
    case.faults[0].evidence.clear()


def no_injector(case: Case) -> None:
    case.faults, case.before = [], []


@pytest.mark.parametrize(
    ("invariant", "corrupt"),
    [
        (Invariant.TOKENS, lost),
        (Invariant.TOKENS, lost_at_the_end),
        (Invariant.TOKENS, doubled),
        (Invariant.TOKENS, swapped),
        (Invariant.ANSWER, lost),
        (Invariant.ANSWER, doubled),
        (Invariant.ANSWER, swapped),
        (Invariant.ANSWER, wrong),
        (Invariant.ANSWER, wrong_in_a_part),
        (Invariant.ANSWER, nothing_to_compare),
        (Invariant.ONE_END, two_ends),
        (Invariant.ONE_END, no_end),
        (Invariant.ONE_END, tokens_after_the_end),
        (Invariant.DEADLINE, after_the_deadline),
        (Invariant.DEADLINE, nobody_was_limited),
        (Invariant.BLOCKS, blocks_missing),
        (Invariant.BLOCKS, blocks_late),
        (Invariant.BLOCKS, blocks_unaccounted),
        (Invariant.BLOCKS, nobody_looked),
        (Invariant.UNHARMED, a_bystander_failed),
        (Invariant.UNHARMED, no_end),
        (Invariant.UNHARMED, a_bystanders_worker_came_anew),
        (Invariant.UNHARMED, a_worker_is_gone),
        (Invariant.OWN_KV, wrong),
        (Invariant.OWN_KV, anothers_answer),
        (Invariant.OWN_KV, all_alike),
        (Invariant.HAPPENED, an_injector_that_did_nothing),
        (Invariant.HAPPENED, no_injector),
    ],
    ids=lambda value: value.name if isinstance(value, Invariant) else value.__name__,
)
def test_what_is_wrong_is_found(invariant: Invariant, corrupt: Callable[[Case], None]) -> None:
    case = faultless()
    corrupt(case)
    with pytest.raises(Violation) as found:
        CHECKERS[invariant](case)
    assert found.value.invariant is invariant
    with pytest.raises(Violation):
        check(case, *Invariant)


def test_what_the_matrix_does_not_name_is_not_looked_at_but_for_three() -> None:
    case = faultless()
    wrong(case)
    check(case, Invariant.TOKENS, Invariant.BLOCKS)
    no_end(case)
    with pytest.raises(Violation, match="ended 0 times"):
        check(case)
