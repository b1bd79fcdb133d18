"""Compares the figures of a load tool with those of kvrelay's own load test for the same load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from load_tools import ToolResult
from rich.table import Table

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.statistics import summarize


@dataclass(frozen=True, slots=True)
class Figure:
    """One latency, in milliseconds."""

    name: str
    tool: float
    # Over the runs before and after the tool together.
    ours: float
    before: float
    after: float

    @property
    def difference(self) -> float:
        """Difference of the tool's figure from ours, in per cent of ours."""
        return (self.tool / self.ours - 1) * 100

    @property
    def noise(self) -> float:
        """Difference between our two runs, in per cent."""
        return (self.after / self.before - 1) * 100


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one tool, compared with ours."""

    tool: str
    version: str
    result: ToolResult
    figures: tuple[Figure, ...]

    def agrees(self, num_requests: int, within: float) -> bool:
        """Whether all requests were answered and the medians differ by at most `within` per
        cent.
        """
        medians = [one for one in self.figures if one.name.endswith("median")]
        complete = self.result.requests >= num_requests and not self.result.errors
        return complete and all(abs(one.difference) <= within for one in medians)


def compare(
    tool: str,
    version: str,
    result: ToolResult,
    itl_of: Literal["gap", "request"],
    before: Sequence[Row],
    after: Sequence[Row],
) -> Comparison:
    """`before` and `after` are the rows of our own runs. All requests must be answered."""
    ours = [_figures(rows, itl_of) for rows in ([*before, *after], before, after)]
    names = ("TTFT median", "TTFT mean", "ITL median", "ITL mean")
    theirs = (*result.ttft, *result.itl)
    return Comparison(tool, version, result, tuple(map(Figure, names, theirs, *ours)))


def _figures(rows: Sequence[Row], itl_of: Literal["gap", "request"]) -> tuple[float, ...]:
    """Returns median and mean of TTFT and ITL, in milliseconds. TTFT counts from the call, as in
    the tools, not from the scheduled arrival.
    """
    ttft = summarize([row.ttft_s - row.late_s for row in rows if row.ttft_s is not None])
    gaps = [gap for row in rows for gap in row.itl_s]
    itl = summarize(
        gaps if itl_of == "gap" else [row.tpot_s for row in rows if row.tpot_s is not None]
    )
    assert ttft is not None, "no request was answered"
    assert itl is not None, "no answer has two or more tokens"
    return tuple(1000 * seconds for seconds in (ttft.median, ttft.mean, itl.median, itl.mean))


def agreement_table(comparisons: Sequence[Comparison]) -> Table:
    """Returns a table with four lines per tool, in milliseconds."""
    table = Table(title="milliseconds", title_justify="left")
    for column in ("tool", "version", "answered", "errors", "tokens", ""):
        table.add_column(column)
    for column in ("tool", "kvrelay", "difference", "change between kvrelay's runs"):
        table.add_column(column, justify="right")
    for one in comparisons:
        result = one.result
        tokens = f"{result.prompt_tokens:.0f} + {result.output_tokens:.0f}"
        head = [one.tool, one.version, str(result.requests), str(result.errors), tokens]
        for figure in one.figures:
            cells = (
                f"{figure.tool:.2f}",
                f"{figure.ours:.2f}",
                f"{figure.difference:+.1f}%",
                f"{figure.noise:+.1f}%",
            )
            table.add_row(*head, figure.name, *cells)
            head = [""] * len(head)
        table.add_section()
    return table
