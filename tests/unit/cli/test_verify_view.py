"""The printed result of `kvrelay verify`."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvrelay.cli.views.verify_view import verdict, verify_view
from kvrelay.verify.report import Difference, PathReport, Report

REPORT = Report(
    "demo",
    "float32",
    64,
    (
        PathReport("local", "transformers' generate", 64, 64, ()),
        PathReport(
            "disaggregated over shm",
            "the local path",
            64,
            63,
            (Difference("a long prompt, sampled [b]", 17, 4, None, 0.25),),
            "12 requests were on the killed worker",
        ),
    ),
)


@pytest.mark.parametrize("width", [40, 80, 140])
def test_all_of_it_is_shown_whole(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    console.print(verify_view(REPORT, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    if width < 140:
        text = " ".join(out.getvalue().split())
        assert "local: 64 of 64 answers identical (with transformers' generate) disagg" in text
        assert (
            "disaggregated over shm: 63 of 64 answers identical (with the local path); first "
            "difference: a long prompt, sampled [b]: token 17 is None, not 4; median logit "
            "margin: 0.2500; 12 requests were on the killed worker"
        ) in text
        # A path begins a line, and its other lines are indented.
        end = next(place for place, line in enumerate(lines) if line.startswith("Different"))
        assert [line[:2] == "  " for line in lines[1:end]].count(False) == 2
        # Words are whole, so no line is a narrow column.
        assert min(len(line) for line in lines[1:-1]) > 12


def test_the_verdict_is_one_sentence() -> None:
    assert verdict(REPORT) == "Different: 1 of 128 answers have other tokens than expected."
    rounded = verdict(replace(REPORT, dtype="bfloat16"))
    assert rounded.endswith("than expected. bfloat16 rounds.")
    same = replace(REPORT, paths=REPORT.paths[:1])
    assert verdict(same) == "Identical: all 64 answers have the expected tokens."
