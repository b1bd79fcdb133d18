"""Detects a hanging step. Pure: the time is an argument, in monotonic seconds."""

from __future__ import annotations

from collections import deque

# Seconds between two polls.
POLL_S = 0.5
# Seconds that the first step may take: it compiles kernels and allocates memory.
FIRST_S = 600.0
# Lower bound, in seconds, for the limit of later steps.
LEAST_S = 30.0
# Limit of a step as a multiple of the slowest step of its size.
TIMES_SLOWEST = 20
# Steps kept per size; the slowest of them is their 99th percentile.
_KEPT = 100


class StepHung(Exception):
    """The engine thread does not return from a step. Only the end of the process can end the
    thread.
    """


class StepWatch:
    """Learns how long steps take, by size, and tracks the age of the running step.

    Steps are grouped by the bit length of their token count. The limit of a step of an unmeasured
    size follows from the highest cost per token of the other sizes.
    """

    def __init__(self) -> None:
        # Age of the running step as of the last poll; 0 while no step runs.
        self.age_s = 0.0
        # Tokens of the running step.
        self.tokens = 0
        self._began: float | None = None
        self._polled = 0.0
        # True once the first step is over.
        self._built = False
        self._seconds: dict[int, deque[float]] = {}

    def began(self, tokens: int, now: float) -> None:
        """A step of `tokens` tokens begins."""
        self._began = self._polled = now
        self.age_s, self.tokens = 0.0, tokens

    def ended(self, now: float) -> None:
        """The step ends. The first step is not measured, since it compiles kernels."""
        assert self._began is not None, "a step ends that has not begun"
        if self._built:
            self._seconds.setdefault(_size(self.tokens), deque(maxlen=_KEPT)).append(
                now - self._began
            )
        self._built = True
        self._began, self.age_s = None, 0.0

    def proven(self, tokens: int, seconds: float) -> None:
        """Adds a step that ran before this watch began, as on a standby worker."""
        self._built = True
        self._seconds.setdefault(_size(tokens), deque(maxlen=_KEPT)).append(seconds)

    def poll(self, now: float) -> bool:
        """Polls the running step; returns True if it hangs. A pause of the whole process counts for
        at most two polling intervals.
        """
        if self._began is None:
            return False
        self.age_s += min(now - self._polled, 2 * POLL_S)
        self._polled = now
        return self.age_s > self.bound_s

    @property
    def bound_s(self) -> float:
        """Largest allowed age of the running step, in seconds."""
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
