"""Azure's LLM inference traces: CSV with times and lengths (Patel et al., Splitwise, ISCA '24)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvrelay.loadtest.traces.trace import TraceError, TraceRequest, check_order, csv_rows

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(file: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yields the requests. Times count from the first request. Raises TraceError."""
    rows = csv_rows(file, lines)
    _, header = next(rows, (1, []))
    if tuple(header) != HEADER:
        raise TraceError(file, 1, f"the header is invalid; expected {','.join(HEADER)}")
    start, before = None, 0.0
    for number, row in rows:
        if not row:
            continue
        try:
            timestamp, prompt, answer = row
            # The timestamps have seven decimals; datetime accepts six.
            moment = datetime.fromisoformat(timestamp[:26]).replace(tzinfo=UTC)
            lengths = int(prompt), int(answer)
        except ValueError as error:
            raise TraceError(
                file, number, f"expected a time and two lengths, not {','.join(row)!r:.100}"
            ) from error
        if lengths[0] < 1 or lengths[1] < 0:
            raise TraceError(
                file, number, "ContextTokens must be at least 1, GeneratedTokens at least 0"
            )
        start = start or moment
        at = (moment - start).total_seconds()
        check_order(file, number, at, before)
        before = at
        yield TraceRequest(at, *lengths)
