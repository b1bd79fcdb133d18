"""How much of the time an engine computes. Pure: the time is an argument, in monotonic seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_LEAST_S = 1.0  # of a life that a share is taken of
_GAP_S = 0.005  # pauses that are shorter count as busy, so that few spans are kept


class BusyTime:
    """Steps of the last WINDOW_S as spans that follow each other."""

    def __init__(self, now: float) -> None:
        self._start = now
        self._began: float | None = None
        self._spans: deque[tuple[float, float]] = deque()

    def began(self, now: float) -> None:
        self._began = now

    def ended(self, now: float) -> None:
        assert self._began is not None, "a step ends that has not begun"
        began, self._began = self._began, None
        if self._spans and began - self._spans[-1][1] < _GAP_S:
            began, _ = self._spans.pop()
        self._spans.append((began, now))
        self._forget(now)

    def share(self, now: float) -> float:
        """Of the window, or of the life until now if that is shorter: 0 to 1. The step that runs counts."""
        self._forget(now)
        since = max(self._start, now - WINDOW_S)
        spans = [*self._spans, (self._began, now)] if self._began is not None else self._spans
        busy = sum(end - max(began, since) for began, end in spans)
        return min(1.0, busy / max(_LEAST_S, now - since))

    def _forget(self, now: float) -> None:
        while self._spans and self._spans[0][1] <= now - WINDOW_S:
            self._spans.popleft()
