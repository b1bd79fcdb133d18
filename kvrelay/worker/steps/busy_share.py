"""The recent utilisation of a worker. Pure: the time is an argument, in monotonic seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
# Shortest time that a share is taken of, in seconds.
_LEAST_S = 1.0
# Seconds. Shorter pauses count as busy, so that few spans are kept.
_GAP_S = 0.005


class BusyTime:
    """The share of time in which the engine computed. Keeps the steps of the last WINDOW_S as
    consecutive spans.
    """

    def __init__(self, now: float) -> None:
        self._start = now
        self._began: float | None = None
        self._spans: deque[tuple[float, float]] = deque()

    def began(self, now: float) -> None:
        """A step begins."""
        self._began = now

    def ended(self, now: float) -> None:
        """The step ends."""
        assert self._began is not None, "a step ends that has not begun"
        began, self._began = self._began, None
        if self._spans and began - self._spans[-1][1] < _GAP_S:
            began, _ = self._spans.pop()
        self._spans.append((began, now))
        self._forget(now)

    def share(self, now: float) -> float:
        """Busy share of the window, or of the time since the start if that is shorter: 0 to 1.
        Includes the running step.
        """
        self._forget(now)
        since = max(self._start, now - WINDOW_S)
        spans = [*self._spans, (self._began, now)] if self._began is not None else self._spans
        busy = sum(end - max(began, since) for began, end in spans)
        return min(1.0, busy / max(_LEAST_S, now - since))

    def _forget(self, now: float) -> None:
        while self._spans and self._spans[0][1] <= now - WINDOW_S:
            self._spans.popleft()


class RecentMean:
    """The time-weighted mean of a value over the last WINDOW_S."""

    def __init__(self, now: float) -> None:
        self._start = now
        # (since when, value)
        self._values: deque[tuple[float, float]] = deque([(now, 0.0)])

    def is_now(self, value: float, now: float) -> None:
        """Records the value from `now` on."""
        if value != self._values[-1][1]:
            self._values.append((now, value))
        while len(self._values) > 1 and self._values[1][0] <= now - WINDOW_S:
            self._values.popleft()

    def mean(self, now: float) -> float:
        """Mean over the window, or over the time since the start if that is shorter."""
        since = max(self._start, now - WINDOW_S)
        ends = [*(at for at, _ in list(self._values)[1:]), now]
        total = sum(
            value * max(0.0, end - max(at, since))
            for (at, value), end in zip(self._values, ends, strict=True)
        )
        return total / max(_LEAST_S, now - since)
