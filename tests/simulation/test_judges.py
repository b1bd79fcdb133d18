"""Judges of histories, given histories in which something is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.history import (
    Act,
    End,
    Fault,
    Part,
    Plan,
    Record,
    judge,
    judge_acts,
    judge_incarnations,
    judge_index,
    judge_leaders,
)
from simulation.toy_engine import answer

from kvrelay.types.requests import SamplingParams

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


@pytest.mark.parametrize(
    "outcome", ["INTERNAL", "DATA_LOSS", "UNAVAILABLE", "FAILED_PRECONDITION", "CANCELLED"]
)
def test_an_error_that_no_fault_explains_is_seen(outcome: str) -> None:
    record = good()
    record.ends = [End(3.0, outcome, "something")]
    assert f"L: ended {outcome}" in complaints(record, DEATH)


def test_two_deaths_explain_a_suspicion_and_one_does_not() -> None:
    record = good()
    record.ends = [End(3.0, "INTERNAL", "2 workers crashed while they computed this request")]
    assert "L: ended INTERNAL" in complaints(record, DEATH)
    assert complaints(record, DEATH, DEATH) == ""
    assert "L: ended INTERNAL" in complaints(
        record, DEATH, Fault("kill", 5.0, 6.0, loses_worker=True)
    )


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
    assert judge_incarnations([("d0", 1), ("d1", 2), ("d0", 1)]) == [
        "E: d0 with epoch 1 was there twice"
    ]


def test_two_leaders_are_seen() -> None:
    assert judge_leaders(4.0, ["a"]) == judge_leaders(4.0, []) == []
    assert judge_leaders(4.0, ["b", "a"]) == ["E: a and b lead at 4.000"]


def test_an_act_of_a_leader_that_was_succeeded_is_seen() -> None:
    first, second = Act(1.0, "a", 1, "start"), Act(2.0, "b", 2, "scale")
    assert (
        judge_acts([first, first, second, Act(3.0, "a", 3, "scale"), Act(4.0, "a", 3, "start")])
        == []
    )
    assert (
        "a in term 1: start at 3.000, after b in term 2"
        in judge_acts([first, second, replace(first, time=3.0)])[0]
    )
    assert (
        "a in term 2: start at 1.000, after b"
        in judge_acts([first, second, replace(first, term=2)])[0]
    )
    assert judge_acts([first, second, replace(first, term=2)], forgotten=True) == []
    assert (
        "a in term 1: start at 1.000, after b"
        in judge_acts([first, second, first], forgotten=True)[0]
    )


def test_an_answer_of_another_version_is_good_and_a_mixed_one_is_not() -> None:
    other = answer(PLAN.prompt, SAMPLING, 1)
    assert other[2:] != TOKENS[2:]
    record = replace(good(), parts=[Part(2.0, 0, other)])
    assert judge([record], [], 3, versions=2) == []
    assert judge([record], [], 3) != []
    mixed = replace(good(), parts=[Part(2.0, 0, TOKENS[:2]), Part(2.5, 2, other[2:])])
    (complaint,) = judge([mixed], [], 3, versions=2)
    assert "of no one version" in complaint


@pytest.mark.parametrize("outcome", ["UNAVAILABLE", "FAILED_PRECONDITION"])
def test_a_version_may_be_gone_only_after_an_upgrade(outcome: str) -> None:
    end = End(3.0, outcome, "model version 'fp_a.b' generated the first 2 tokens")
    record = replace(good(), parts=[Part(2.0, 0, TOKENS[:2])], ends=[end])
    assert judge([record], [Fault("upgrade the model", 1.5, 2.0)], 3, versions=2) == []
    assert judge([record], [Fault("scale the pools", 1.5, 2.0)], 3, versions=2) != []


def test_a_block_that_a_router_wrongly_believes_in_or_does_not_know_is_seen() -> None:
    assert judge_index([1, 2], iter([2, 1])) == []
    assert judge_index([1, 2, 3], [1]) == ["believes in 2 blocks that it does not hold"]
    assert judge_index([1], [1, 2]) == ["does not know 1 of its 2 blocks"]
