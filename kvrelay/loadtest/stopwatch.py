"""Times one request."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from kvrelay.errors import KvRelayError
from kvrelay.loadtest.report.row import Row


class Stopwatch:
    """Started when a request is sent, told of each token that comes, asked for the row."""

    def __init__(self, start: float, at: float) -> None:
        """start: of the test, on time.perf_counter. at: when the request was due, in seconds after
        it.
        """
        self._due = start + at
        self._row: dict[str, Any] = {"scheduled_s": at, "late_s": time.perf_counter() - self._due}
        self._times: list[float] = []
        self._tokens = 0

    def tokens(self, count: int) -> None:
        if count:
            self._times.append(time.perf_counter())
            self._tokens += count

    def answered(self, output_tokens: int | None = None, **facts: Any) -> Row:
        """output_tokens: if the target tells them; else those that came are counted."""
        times = self._times
        return Row(
            **self._row,
            ttft_s=times[0] - self._due if times else None,
            itl_s=tuple(after - before for before, after in pairwise(times)),
            e2e_s=times[-1] - self._due if times else None,
            output_tokens=self._tokens if output_tokens is None else output_tokens,
            **facts,
        )

    def failed(self, error: KvRelayError) -> Row:
        return Row(
            **self._row,
            e2e_s=time.perf_counter() - self._due,
            output_tokens=self._tokens,
            error=error.code.name,
            message=error.message,
        )
