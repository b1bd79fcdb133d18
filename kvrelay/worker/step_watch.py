"""From when on a step is no step any more but a hang. Pure: the time is an argument, in monotonic
seconds.
"""

from __future__ import annotations

from collections import deque

LOOK_S = 0.5  # between two looks
FIRST_S = 600.0  # what the first step may take: it builds kernels and takes memory
LEAST_S = 30.0  # what any later one may take, however fast the others were
TIMES_SLOWEST = 20  # what a step may take in times of the slowest of its size
_KEPT = 100  # steps of a size, the slowest of which is their 99th percentile


class StepHung(Exception):
    """The engine thread does not come back from a step. Nothing in this process can end it, but the
    process's end.
    """


class StepWatch:
    """Learns how long steps take, by size, and ages the one that runs.

    Sizes are tokens to the next power of two. A step of a size that was never measured is judged by
    the most that a token has cost in any other.
    """

    def __init__(self) -> None:
        self.age_s = 0.0  # of the step that runs, as of the last look; 0 while none does
        self.tokens = 0  # that it computes
        self._began: float | None = None
        self._looked = 0.0
        self._built = False  # the first step is over
        self._seconds: dict[int, deque[float]] = {}

    def began(self, tokens: int, now: float) -> None:
        self._began = self._looked = now
        self.age_s, self.tokens = 0.0, tokens

    def ended(self, now: float) -> None:
        assert self._began is not None, "a step ends that has not begun"
        if self._built:
            self._seconds.setdefault(_size(self.tokens), deque(maxlen=_KEPT)).append(
                now - self._began
            )
        self._built = True
        self._began, self.age_s = None, 0.0

    def proven(self, tokens: int, seconds: float) -> None:
        """A step of that size ran before this watch began, as on a worker that stood by."""
        self._built = True
        self._seconds.setdefault(_size(tokens), deque(maxlen=_KEPT)).append(seconds)

    def look(self, now: float) -> bool:
        """Whether the step that runs hangs. Of a pause of this whole process no more than two
        looks' time counts.
        """
        if self._began is None:
            return False
        self.age_s += min(now - self._looked, 2 * LOOK_S)
        self._looked = now
        return self.age_s > self.bound_s

    @property
    def bound_s(self) -> float:
        """How old the step that runs may become."""
        if not self._built:
            return FIRST_S
        measured = self._seconds.get(_size(self.tokens))
        if measured:
            return max(LEAST_S, TIMES_SLOWEST * max(measured))
        dearest = max(
            (max(times) / (2**size / 2) for size, times in self._seconds.items()), default=0.0
        )
        return max(LEAST_S, TIMES_SLOWEST * dearest * self.tokens)


def _size(tokens: int) -> int:
    return tokens.bit_length()
