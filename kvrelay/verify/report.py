"""Compares the answers of several paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kvrelay.verify.cases import Case

Answers = Mapping[str, tuple[int, ...]]
"""Token ids by case name."""

Margin = Callable[[Case, tuple[int, ...], int, int], float]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between an answer and the expected answer. A token of None is the end of
    an answer.
    """

    case: str
    position: int
    expected: int | None
    got: int | None
    # Difference between the logits of the two tokens in the reference model; None for a sampled or
    # shorter answer.
    logit_margin: float | None


@dataclass(frozen=True, slots=True)
class PathReport:
    """The comparison of one path with its expected answers."""

    path: str
    expected: str
    compared: int
    identical: int
    differences: tuple[Difference, ...]
    note: str = ""

    @property
    def median_margin(self) -> float | None:
        """Median logit margin of the differences; None if none has a margin."""
        margins = [one.logit_margin for one in self.differences if one.logit_margin is not None]
        return median(margins) if margins else None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification."""

    model: str
    dtype: str
    requests: int
    paths: tuple[PathReport, ...]

    @property
    def identical(self) -> bool:
        """Whether all answers of all paths are as expected."""
        return all(path.identical == path.compared for path in self.paths)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the derived figures."""
        return {
            **asdict(self),
            "identical": self.identical,
            "paths": [
                {
                    **asdict(path),
                    "share": path.identical / path.compared if path.compared else None,
                    "median_logit_margin": path.median_margin,
                }
                for path in self.paths
            ],
        }


def compare(
    path: str,
    cases: list[Case],
    got: Answers,
    expected: Answers,
    expected_name: str,
    margin: Margin,
    note: str = "",
) -> PathReport:
    """Compares the cases that both `got` and `expected` contain."""
    both = [case for case in cases if case.name in got and case.name in expected]
    differences = tuple(
        _difference(case, got[case.name], expected[case.name], margin)
        for case in both
        if got[case.name] != expected[case.name]
    )
    return PathReport(
        path, expected_name, len(both), len(both) - len(differences), differences, note
    )


def _difference(
    case: Case, got: tuple[int, ...], expected: tuple[int, ...], margin: Margin
) -> Difference:
    pairs = zip(got, expected, strict=False)
    shorter = min(len(got), len(expected))
    position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    ours = got[position] if position < len(got) else None
    theirs = expected[position] if position < len(expected) else None
    gap = None
    if case.greedy and ours is not None and theirs is not None:
        gap = margin(case, expected[:position], ours, theirs)
    return Difference(case.name, position, theirs, ours, gap)
