"""How fast a worker computes prompts."""

from __future__ import annotations

from collections import deque
from statistics import median

# A measurement counts for this time, in seconds. Without new ones the rate becomes unknown, so a
# wrong one keeps no prompts away for long.
WINDOW_S = 30.0
# Measurements that count. A single odd one among them changes nothing.
_MOST = 15


class PromptRate:
    """The rate of a worker in prompt tokens per second: the median of its recent steps. Pure: the
    time is an argument, in monotonic seconds.
    """

    def __init__(self, least_tokens: int) -> None:
        """least_tokens: steps with fewer prompt tokens do not count, since most of their time is
        the fixed cost of a step.
        """
        self._least_tokens = least_tokens
        # (end of the step, rate)
        self._steps: deque[tuple[float, float]] = deque(maxlen=_MOST)
        # The rate at the last measurement, however old; None before the first.
        self.latest: float | None = None

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """Adds a step of `tokens` prompt tokens, which took `seconds`."""
        if tokens >= self._least_tokens and seconds > 0:
            self._steps.append((now, tokens / seconds))
            self.latest = self.per_second(now)

    def per_second(self, now: float) -> float | None:
        """Returns the tokens per second; None if no recent step had enough prompt tokens."""
        while self._steps and self._steps[0][0] <= now - WINDOW_S:
            self._steps.popleft()
        return median(rate for _, rate in self._steps) if self._steps else None
