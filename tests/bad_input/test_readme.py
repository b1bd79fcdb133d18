"""The table of bad inputs names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from mutants.mutant import ROOT, check_tests

TABLE = Path(__file__).with_name("README.md").read_text()


def test_each_line_has_a_test() -> None:
    rows = [
        line
        for line in TABLE.splitlines()
        if line.startswith("| ") and not line.startswith("| input")
    ]
    assert len(rows) >= 38
    for row in rows:
        assert re.search(r"`\S+\.py::\w+`|\| the same", row), row


def test_the_tests_are_there() -> None:
    check_tests(re.findall(r"`(\S+\.py::\w+)`", TABLE), ROOT)
