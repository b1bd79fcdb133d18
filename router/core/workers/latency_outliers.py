"""Latency outliers: workers that are slower than their pool, corrected for load."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW_S = 60.0
# Samples kept per worker.
MOST = 64
# Factor over the other workers that makes an outlier.
FACTOR = 3.0
# A smaller difference is too short to notice.
NOTICEABLE_S = 0.01


@dataclass(frozen=True, slots=True)
class Typical:
    """Median size and median seconds of work items. The size is the number of sequences of a decode
    step or of tokens of a prompt.
    """

    size: float
    seconds: float


class RecentLatency:
    """The last work items of one worker."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=MOST)

    def add(self, now: float, size: int, seconds: float) -> None:
        """Adds a work item of `size` that took `seconds`."""
        self._samples.append((now, size, seconds))

    def clear(self) -> None:
        """Forgets all samples."""
        self._samples.clear()

    def typical(self, now: float, least: int) -> Typical | None:
        """Returns the medians over the last WINDOW_S. None with fewer than `least` samples."""
        recent = [(size, seconds) for at, size, seconds in self._samples if now - at <= WINDOW_S]
        if len(recent) < least:
            return None
        return Typical(median(size for size, _ in recent), median(seconds for _, seconds in recent))


def times_slower(one: Typical, others: Sequence[Typical]) -> float | None:
    """Returns the worker's time as a multiple of the other workers' median. None if the worker is
    no outlier.

    More work takes longer, but at most in proportion; less work never takes longer. So the other
    workers would need at most their own time for this worker's items, scaled up in proportion if
    the items are larger. A worker that is slower than FACTOR times this bound is slow for a reason
    other than load.
    """
    if not others:
        return None
    bound = median(peer.seconds * max(1.0, one.size / max(1.0, peer.size)) for peer in others)
    if one.seconds <= FACTOR * bound or one.seconds - bound < NOTICEABLE_S:
        return None
    return one.seconds / max(bound, 1e-9)
