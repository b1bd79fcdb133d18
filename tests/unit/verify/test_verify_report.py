from __future__ import annotations

from kvrelay.verify.cases import Case, make_cases
from kvrelay.verify.report import Report, compare

GREEDY = Case("g", (1, 2), {"temperature": 0.0})
SAMPLED = Case("s", (1, 2), {"temperature": 1.0})


def margin(case: Case, prefix: tuple[int, ...], ours: int, theirs: int) -> float:
    return float(len(prefix) + 100 * ours + 10_000 * theirs)


def test_cases_are_the_same_each_time_of_mixed_length_and_fit_the_context() -> None:
    cases = make_cases(64, vocab_size=50, max_model_len=300)
    assert cases == make_cases(64, vocab_size=50, max_model_len=300)
    lengths = sorted(len(case.token_ids) for case in cases)
    assert lengths[0] < 10
    assert lengths[-1] > 150
    assert all(len(case.token_ids) + case.options["max_tokens"] <= 300 for case in cases)
    assert all(0 <= token < 50 for case in cases for token in case.token_ids)
    assert sum(case.greedy for case in cases) == 32
    assert all("seed" in case.options for case in cases if not case.greedy)
    assert len({case.name for case in cases}) == 64


def test_cases_fit_a_small_context() -> None:
    for case in make_cases(16, vocab_size=50, max_model_len=64):
        assert case.token_ids
        assert len(case.token_ids) + case.options["max_tokens"] <= 64


def test_equal_answers_are_identical() -> None:
    answers = {"g": (5, 6), "s": (7,)}
    path = compare("p", [GREEDY, SAMPLED], answers, answers, "e", margin)
    assert (path.compared, path.identical, path.differences) == (2, 2, ())
    assert Report("m", "float32", 2, (path,)).identical


def test_the_first_difference_is_named_with_its_margin() -> None:
    got, expected = {"g": (5, 6, 7), "s": (1, 2)}, {"g": (5, 9, 7), "s": (1, 3)}
    path = compare("p", [GREEDY, SAMPLED], got, expected, "e", margin)
    greedy, sampled = path.differences
    assert (greedy.position, greedy.got, greedy.expected, greedy.logit_margin) == (
        1,
        6,
        9,
        1 + 600 + 90_000,
    )
    assert (sampled.position, sampled.logit_margin) == (1, None)
    report = Report("m", "bfloat16", 2, (path,))
    assert not report.identical
    assert report.as_dict()["paths"][0]["share"] == 0.0
    assert report.as_dict()["paths"][0]["median_logit_margin"] == 90_601


def test_an_answer_that_ends_early_differs_at_its_end() -> None:
    path = compare("p", [GREEDY], {"g": (5,)}, {"g": (5, 6)}, "e", margin)
    (difference,) = path.differences
    assert (difference.position, difference.got, difference.expected) == (1, None, 6)


def test_what_only_one_side_has_is_not_compared() -> None:
    path = compare("p", [GREEDY, SAMPLED], {"g": (5,), "s": (1,)}, {"g": (5,)}, "e", margin)
    assert (path.compared, path.identical) == (1, 1)
