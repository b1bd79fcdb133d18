"""Recorded requests: their arrival times and lengths, without text."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from kvrelay.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    # Seconds after the start of the trace.
    at: float
    input_tokens: int
    output_tokens: int
    # Ids of the blocks of the prompt; the last block may be partial. Equal leading ids mean equal
    # prefixes.
    blocks: tuple[int, ...] = ()


class TraceError(InvalidArgument):
    """A line of a trace that cannot be parsed. The message names the line."""

    def __init__(self, file: Path, line: int, what: str) -> None:
        super().__init__(f"{file}:{line}: {what}", field="trace")


def from_second(requests: Iterable[TraceRequest], second: float) -> Iterator[TraceRequest]:
    """Yields the requests from `second` of the trace on."""
    return dropwhile(lambda request: request.at < second, requests)


def check_order(file: Path, line: int, at: float, before: float) -> None:
    """Raises TraceError for a request that comes before the previous request."""
    if at < before:
        raise TraceError(
            file,
            line,
            f"the request is {before - at:g} s earlier than the request on the previous line",
        )


def csv_rows(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yields each row with its line number, from 1. Raises TraceError for text that is not CSV."""
    rows = csv.reader(lines)
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise TraceError(file, rows.line_num, f"not CSV: {error}") from error
