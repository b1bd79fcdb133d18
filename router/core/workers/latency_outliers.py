"""How fast a worker is, whatever it was given to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW_S = 60.0
MOST = 64  # samples kept
FACTOR = 3.0  # times slower than the others
NOTICEABLE_S = 0.01  # slower by less than that nobody feels


@dataclass(frozen=True, slots=True)
class Typical:
    """Medians of pieces of work: sequences of a decode step or tokens of a prompt, and the seconds
    that they took.
    """

    size: float
    seconds: float


class Speed:
    """The last pieces of work of one worker."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=MOST)

    def add(self, now: float, size: int, seconds: float) -> None:
        self._samples.append((now, size, seconds))

    def clear(self) -> None:
        self._samples.clear()

    def typical(self, now: float, least: int) -> Typical | None:
        """None if there were fewer than `least` in the window."""
        recent = [(size, seconds) for at, size, seconds in self._samples if now - at <= WINDOW_S]
        if len(recent) < least:
            return None
        return Typical(median(size for size, _ in recent), median(seconds for _, seconds in recent))


def times_slower(one: Typical, others: Sequence[Typical]) -> float | None:
    """How many times as long as the others' median it takes, None if it is no outlier.

    More work takes longer, though never by more than in proportion, and less work never takes
    longer. So what the others would need for this worker's pieces is at most their time, stretched
    in proportion where its pieces are larger. Slower than FACTOR times that is not for the load
    that it was given.
    """
    if not others:
        return None
    bound = median(peer.seconds * max(1.0, one.size / max(1.0, peer.size)) for peer in others)
    if one.seconds <= FACTOR * bound or one.seconds - bound < NOTICEABLE_S:
        return None
    return one.seconds / max(bound, 1e-9)
