"""Measures the times of one request."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from kvrelay.errors import KvRelayError
from kvrelay.loadtest.report.row import Row


class Stopwatch:
    """Starts when a request is sent, records each token, and builds the row."""

    def __init__(self, start: float, at: float) -> None:
        """start: start of the test on time.perf_counter. at: when the request is due, in seconds
        after the start.
        """
        self._due = start + at
        self._row: dict[str, Any] = {"scheduled_s": at, "late_s": time.perf_counter() - self._due}
        self._times: list[float] = []
        self._tokens = 0

    def tokens(self, count: int) -> None:
        """Records the arrival of `count` tokens."""
        if count:
            self._times.append(time.perf_counter())
            self._tokens += count

    def answered(self, output_tokens: int | None = None, **facts: Any) -> Row:
        """Returns the row of an answered request. output_tokens: the count that the target reports;
        by default, the tokens that arrived are counted.
        """
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
        """Returns the row of a failed request."""
        return Row(
            **self._row,
            e2e_s=time.perf_counter() - self._due,
            output_tokens=self._tokens,
            error=error.code.name,
            message=error.message,
        )
