"""Judges of histories, given histories in which something is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.history import (
    End,
    Fault,
    Part,
    Plan,
    Record,
    Reign,
    judge,
    judge_incarnations,
    judge_leaders,
)
from simulation.toy_engine import answer

from kvrelay.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=6, seed=2, ignore_eos=True)
PLAN = Plan("r0", at=1.0, prompt=(5, 6, 7), sampling=SAMPLING, timeout=10.0)
TOKENS = answer(PLAN.prompt, SAMPLING)
DEATH = Fault("kill", 1.0, 2.0, loses_worker=True)


def good() -> Record:
    parts = [Part(2.0, 0, TOKENS[:1]), Part(2.5, 1, TOKENS[1:4]), Part(3.0, 4, TOKENS[4:])]
    return Record(PLAN, parts, [End(3.0, "length")], attempts=("p>d: finished",))


def complaints(record: Record, *faults: Fault) -> str:
    return "; ".join(judge([record], faults, max_attempts=3))


def test_a_good_history_passes() -> None:
    assert complaints(good()) == ""
    assert len(set(TOKENS)) == 6, "the tests below tell them apart"


def test_a_lost_token_is_seen() -> None:
    record = good()
    del record.parts[1]
    assert "T: token 4 came where 1 was due" in complaints(record)


def test_a_token_that_comes_twice_is_seen() -> None:
    record = good()
    record.parts.insert(1, record.parts[0])
    assert "T: token 0 came where 1 was due" in complaints(record)


def test_parts_out_of_order_are_seen() -> None:
    record = good()
    record.parts.reverse()
    assert "T: token 4 came where 0 was due" in complaints(record)


@pytest.mark.parametrize("index", range(6))
def test_a_wrong_token_is_seen(index: int) -> None:
    record = good()
    tokens = list(record.tokens)
    tokens[index] += 1
    record.parts = [Part(2.0, 0, tuple(tokens))]
    assert f"G: token {index} is not that of the unfaulted answer" in complaints(record)


def test_a_token_too_many_is_seen() -> None:
    record = good()
    record.parts.append(Part(3.0, 6, (1,)))
    assert "G: token 6" in complaints(record)


def test_an_answer_that_ends_early_is_seen() -> None:
    record = good()
    record.parts.pop()
    assert "G: the answer ended well after 4 of 6 tokens" in complaints(record)
    record.plan = replace(PLAN, stop_token=TOKENS[3])
    assert complaints(record) == ""


def test_tokens_after_a_stop_string_are_seen() -> None:
    record = good()
    record.plan = replace(PLAN, stop_token=TOKENS[3])
    assert "G: token 4" in complaints(record)


@pytest.mark.parametrize("ends", [[], [End(3.0, "length"), End(3.1, "CANCELLED")]])
def test_no_end_and_two_ends_are_seen(ends: list[End]) -> None:
    record = good()
    record.ends = ends
    assert f"1: {len(ends)} terminal statuses" in complaints(record)


def test_tokens_after_the_end_are_seen() -> None:
    record = good()
    record.ends = [End(2.7, "length")]
    assert "1: tokens 4.. came after the end" in complaints(record)


def test_a_missed_deadline_is_seen() -> None:
    record = good()
    record.ends = [End(11.5, "DEADLINE_EXCEEDED")]
    assert "D: ended at 11.500, 0.500 s after its deadline" in complaints(record)
    assert complaints(record, Fault("freeze the router", 10.0, 12.0, stops_router=True)) == ""


def test_a_deadline_that_strikes_too_early_is_seen() -> None:
    record = good()
    record.ends = [End(9.0, "DEADLINE_EXCEEDED")]
    assert "D: expired 2.000 s before its deadline" in complaints(record)


@pytest.mark.parametrize("outcome", ["INTERNAL", "DATA_LOSS", "UNAVAILABLE", "FAILED_PRECONDITION", "CANCELLED"])
def test_an_error_that_no_fault_explains_is_seen(outcome: str) -> None:
    record = good()
    record.ends = [End(3.0, outcome, "something")]
    assert f"L: ended {outcome}" in complaints(record, DEATH)


def test_two_deaths_explain_a_suspicion_and_one_does_not() -> None:
    record = good()
    record.ends = [End(3.0, "INTERNAL", "2 workers died computing this request")]
    assert "L: ended INTERNAL" in complaints(record, DEATH)
    assert complaints(record, DEATH, DEATH) == ""
    assert "L: ended INTERNAL" in complaints(record, DEATH, Fault("kill", 5.0, 6.0, loses_worker=True))


def test_a_cancel_that_nobody_asked_for_is_seen() -> None:
    record = good()
    record.ends = [End(3.0, "CANCELLED")]
    assert "L: ended CANCELLED" in complaints(record)
    record.left_in = "decoding"
    assert complaints(record) == ""


def test_an_answer_to_a_poisoned_request_is_seen() -> None:
    record = good()
    record.plan = replace(PLAN, poison=True)
    assert "L: ended length" in complaints(record)


def test_a_name_and_epoch_used_twice_are_seen() -> None:
    assert judge_incarnations([("d0", 1), ("d0", 2), ("d1", 1)]) == []
    assert judge_incarnations([("d0", 1), ("d1", 2), ("d0", 1)]) == ["E: d0 with epoch 1 was there twice"]


def test_two_leaders_and_an_old_token_are_seen() -> None:
    first, second = Reign("a", 1, 0.0, 5.0), Reign("b", 2, 6.0, 9.0)
    assert judge_leaders([first, replace(first, start=2.0, until=6.0), second], [1, 1, 2]) == []
    assert "leads from 4.000" in judge_leaders([first, replace(second, start=4.0)], [])[0]
    assert "token 1 came after 2" in judge_leaders([second, replace(first, start=9.5, until=10.0)], [])[0]
    assert "token 1 came after 1" in judge_leaders([first, replace(second, token=1)], [])[0]
    assert "older leader" in judge_leaders([], [1, 2, 1])[0]
