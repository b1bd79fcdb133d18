from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.errors import FailedPrecondition
from kvrelay.tenants import Tenant
from kvrelay.types.requests import SamplingParams
from router.core.request import Request
from router.core.workers.quarantine import MOST, QUARANTINE_S, Quarantine

POISON = Request("a", (1, 2, 3), SamplingParams(max_tokens=9, seed=5), 0.0, 100.0)


def test_the_like_of_it_is_refused_for_a_while_and_told_how_long() -> None:
    quarantine = Quarantine()
    quarantine.check(POISON, 0.0)
    quarantine.add(POISON, 10.0)
    again = replace(POISON, request_id="b", sampling=replace(POISON.sampling, seed=77))
    with pytest.raises(FailedPrecondition, match=r"rejected for another 590 s"):
        quarantine.check(again, 20.0)
    quarantine.check(again, 10.0 + QUARANTINE_S)
    assert len(quarantine) == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(POISON, token_ids=(1, 2)),
        replace(POISON, sampling=SamplingParams(max_tokens=8, seed=5)),
        replace(POISON, tenant=Tenant("other")),
    ],
)
def test_others_are_not(other: Request) -> None:
    quarantine = Quarantine()
    quarantine.add(POISON, 0.0)
    quarantine.check(other, 1.0)


def test_processes_learn_from_each_other() -> None:
    one, other = Quarantine(), Quarantine()
    for number in range(3):
        one.add(replace(POISON, token_ids=(number,)), float(number))
        other.add(replace(POISON, token_ids=(number + 1,)), 10.0 + number)
    other.learn(one.known(5.0))
    assert len(other) == 4
    with pytest.raises(FailedPrecondition, match="another 5 s"):
        other.check(replace(POISON, token_ids=(0,)), QUARANTINE_S - 5)
    # What both know ends as each began it, and in this order.
    other.check(replace(POISON, token_ids=(0,)), QUARANTINE_S)
    assert len(other) == 3
    other.known(QUARANTINE_S + 11.0)
    assert len(other) == 1
    for number in range(MOST):
        one.add(replace(POISON, token_ids=(9, number)), 100.0)
    other.learn(one.known(100.0))
    assert len(other) == MOST


def test_it_remembers_no_more_than_its_bound() -> None:
    quarantine = Quarantine()
    for number in range(MOST + 10):
        quarantine.add(replace(POISON, token_ids=(number,)), 0.0)
    assert len(quarantine) == MOST
    quarantine.check(replace(POISON, token_ids=(0,)), 1.0)
    with pytest.raises(FailedPrecondition):
        quarantine.check(replace(POISON, token_ids=(MOST,)), 1.0)
