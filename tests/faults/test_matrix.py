"""The matrix is whole: each of its 26 rows has a test here, or one of a cluster with Ray."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROWS = set(range(1, 27))
TABLES = (HERE / "README.md").read_text().split("## With Ray")


def rows_of(table: str) -> dict[int, str]:
    return {int(row): rest for row, rest in re.findall(r"^\| (\d+) \|(.*)$", table, re.MULTILINE)}


def names_in(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))


def test_each_row_is_in_one_of_the_tables() -> None:
    here, with_ray = (rows_of(table) for table in TABLES)
    assert here.keys() | with_ray.keys() == ROWS
    assert not here.keys() & with_ray.keys()


def test_the_rows_that_are_here_have_tests_with_their_number_in_the_file_that_is_named() -> None:
    numbered: dict[int, set[str]] = {}
    for file in HERE.glob("test_rows_*.py"):
        for name in names_in(file):
            match = re.match(r"test_row_(\d\d)_", name)
            assert match is not None, f"{file.name}: {name} says no row"
            numbered.setdefault(int(match[1]), set()).add(file.name)
    named = {row: set(re.findall(r"`(test_rows_\w+\.py)`", rest)) for row, rest in rows_of(TABLES[0]).items()}
    assert numbered == named


def test_the_tests_with_ray_are_there() -> None:
    for row, rest in rows_of(TABLES[1]).items():
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", rest)
        assert named, f"row {row} names no test"
        for path, name in named:
            assert name in names_in(ROOT / path), f"row {row}: {path} has no {name}"
