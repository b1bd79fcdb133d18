"""The result of `kvrelay verify` for a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kvrelay.verify.report import PathReport, Report

# Columns of the table; narrower terminals get lines.
_WIDE = 110
_COLUMNS = ("path", "compared with", "identical", "first difference", "median logit margin", "")


def verify_view(report: Report, width: int) -> RenderableType:
    """Renders a report in `width` columns: a table, or a paragraph per path in few columns. The
    verdict is the last line.
    """
    title = f"{report.requests} requests on each path, {report.dtype}"
    if width < _WIDE:
        paragraphs = (
            textwrap.fill(_paragraph(path), width, subsequent_indent="  ", break_on_hyphens=False)
            for path in report.paths
        )
        return Group(title, *map(Text, paragraphs), verdict(report))
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column)
    for path in report.paths:
        table.add_row(
            path.path,
            path.expected,
            f"{path.identical} of {path.compared}",
            _first_difference(path),
            _margin(path),
            path.note,
        )
    return Group(table, verdict(report))


def verdict(report: Report) -> str:
    """Says in a sentence whether the paths agree."""
    compared = sum(path.compared for path in report.paths)
    different = compared - sum(path.identical for path in report.paths)
    if not different:
        return f"Identical: all {compared} answers have the expected tokens."
    found = f"Different: {different} of {compared} answers have other tokens than expected."
    return found if report.dtype == "float32" else f"{found} {report.dtype} rounds."


def _paragraph(path: PathReport) -> str:
    counts = f"{path.identical} of {path.compared} answers identical"
    parts = [f"{path.path}: {counts} (with {path.expected})"]
    if path.differences:
        parts.append(f"first difference: {_first_difference(path)}")
        parts.append(f"median logit margin: {_margin(path)}")
    if path.note:
        parts.append(path.note)
    return "; ".join(parts)


def _first_difference(path: PathReport) -> str:
    if not path.differences:
        return "none"
    first = path.differences[0]
    return f"{first.case}: token {first.position} is {first.got}, not {first.expected}"


def _margin(path: PathReport) -> str:
    return "-" if path.median_margin is None else f"{path.median_margin:.4f}"
