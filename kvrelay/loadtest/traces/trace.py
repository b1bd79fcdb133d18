"""Recorded requests: when they came and how long they were. No text is recorded."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from kvrelay.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at: float  # seconds after the trace's start
    input_tokens: int
    output_tokens: int
    # Ids of the blocks that the prompt consists of, the last one perhaps in part. Equal leading ids
    # are equal prefixes.
    blocks: tuple[int, ...] = ()


class TraceError(InvalidArgument):
    """A line of a trace that cannot be understood; says which."""

    def __init__(self, file: Path, line: int, what: str) -> None:
        super().__init__(f"{file}:{line}: {what}", field="trace")


def from_second(requests: Iterable[TraceRequest], second: float) -> Iterator[TraceRequest]:
    """Those from `second` of the trace on."""
    return dropwhile(lambda request: request.at < second, requests)


def check_order(file: Path, line: int, at: float, before: float) -> None:
    """Raises TraceError for a request that comes before its predecessor."""
    if at < before:
        raise TraceError(file, line, f"the request came {before - at:g} s before the one above it")


def csv_rows(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Each row with its line, from 1. Raises TraceError for what is not CSV."""
    rows = csv.reader(lines)
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise TraceError(file, rows.line_num, f"not CSV: {error}") from error
