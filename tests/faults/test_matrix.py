"""The matrix is whole: each of its rows has a test here, one of a cluster with Ray, or one beside
what it is of.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROWS = set(range(1, 46))
TABLES = re.split(
    "^## (?:With Ray|One harms no other)$", (HERE / "README.md").read_text(), flags=re.MULTILINE
)


def rows_of(table: str) -> dict[int, str]:
    return {int(row): rest for row, rest in re.findall(r"^\| (\d+) \|(.*)$", table, re.MULTILINE)}


def names_in(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))


def test_each_row_is_in_one_of_the_tables() -> None:
    rows = [row for table in TABLES for row in rows_of(table)]
    assert sorted(rows) == sorted(ROWS)


def test_the_rows_that_are_here_have_tests_with_their_number_in_the_file_that_is_named() -> None:
    numbered: dict[int, set[str]] = {}
    for file in HERE.glob("test_rows_*.py"):
        for name in names_in(file):
            match = re.match(r"test_row_(\d\d)_", name)
            assert match is not None, f"{file.name}: {name} says no row"
            numbered.setdefault(int(match[1]), set()).add(file.name)
    named = {
        row: set(re.findall(r"`(test_rows_\w+\.py)`", rest))
        for row, rest in rows_of(TABLES[0]).items()
    }
    assert numbered == named


def test_the_tests_elsewhere_are_there() -> None:
    for row, rest in (rows_of(TABLES[1]) | rows_of(TABLES[2])).items():
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", rest)
        assert named, f"row {row} names no test"
        for path, name in named:
            assert name in names_in(ROOT / path), f"row {row}: {path} has no {name}"
