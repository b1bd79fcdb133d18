from __future__ import annotations

from io import StringIO

import pytest
from case_table import CaseRow, case_table
from rich.console import Console

HEAD = ("openai", "3.57.0", "chat")


@pytest.mark.parametrize(
    ("row", "passed", "shown"),
    [
        (CaseRow(*HEAD, 0, ""), True, ("passed", "")),
        (CaseRow(*HEAD, 9, ""), True, ("passed", "")),
        (
            CaseRow(*HEAD, 9, "", killed=False, same=True),
            False,
            ("passed", "the answer ended before the kill"),
        ),
        (CaseRow(*HEAD, 9, "", killed=True, same=True), True, ("passed", "same answer")),
        (CaseRow(*HEAD, 9, "", killed=True), False, ("passed", "ANOTHER ANSWER")),
        (CaseRow(*HEAD, 9, "a\nE: b"), False, ("E: b", "")),
        (CaseRow(*HEAD, 9, "", killed=True, kill_error="E"), False, ("passed", "E")),
    ],
)
def test_row(row: CaseRow, passed: bool, shown: tuple[str, str]) -> None:
    assert row.passed == passed
    assert (row.undisturbed, row.with_a_kill) == shown
    written = StringIO()
    Console(width=160, file=written).print(case_table([row]))
    assert all(one in written.getvalue() for one in (*HEAD, *shown))
