"""How much more load the workers of a pool measure than their step costs give. Pure: the time is an
argument, in monotonic seconds.
"""

from __future__ import annotations

from collections import deque

# Loads of this time are compared, in seconds.
_WINDOW_S = 60.0
# Worker-seconds that are added to both, so that a small load does not count for much.
_PRIOR = 10.0
_MOST = 4.0


class LoadCorrection:
    """Owns the last measured and expected loads of one pool, in workers."""

    def __init__(self) -> None:
        # (time, measured worker-seconds, expected worker-seconds), oldest first.
        self._loads: deque[tuple[float, float, float]] = deque()
        self._last: float | None = None

    def add(self, measured: float, expected: float, workers: int, now: float) -> None:
        """Adds the loads at `now`. A pool that is busy all the time does not show its whole load,
        so it only counts where it shows more than is expected.
        """
        # After a gap, one moment does not stand for the whole of it.
        seconds = 1.0 if self._last is None else min(_WINDOW_S / 6, now - self._last)
        self._last = now
        while self._loads and self._loads[0][0] < now - _WINDOW_S:
            self._loads.popleft()
        if measured < 0.9 * workers or measured > self.ratio * expected:
            self._loads.append((now, measured * seconds, expected * seconds))

    @property
    def ratio(self) -> float:
        """Measured load over expected load: 1 if nothing is known, at most 4."""
        measured = sum(one for _, one, _ in self._loads)
        expected = sum(one for _, _, one in self._loads)
        return min(_MOST, (measured + _PRIOR) / (expected + _PRIOR))
