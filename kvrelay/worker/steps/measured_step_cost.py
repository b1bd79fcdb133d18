"""What the tokens of a step cost, and the utilisation that follows from it. Pure: the time is an
argument, in monotonic seconds.
"""

from __future__ import annotations

from collections import deque

from kvrelay.worker.steps.busy_share import WINDOW_S

# Shortest time that a share is taken of, in seconds.
_LEAST_S = 1.0
# Weight of a step relative to the next one. About 5000 steps count.
_FADE = 0.9998


def utilisation(added: float, fill: float) -> float:
    """Returns a decode worker's throughput as a share of its throughput with a full batch: 0 to 1.

    - added: share of the time that the tokens add to the steps, beyond the time of an empty step.
    - fill: share of the batch that is taken. The batch is full without free batch slots or blocks.

    A step of b sequences takes a + c b seconds, so the throughput of a batch is b / (a + c b). Over
    the throughput of a full batch, that is 1 - (1 - added) (1 - fill), with added = c b / (a + c b)
    and fill = b / full batch. Twice the utilisation serves twice the load, which holds neither for
    the fill nor for the busy time.
    """
    return 1 - (1 - min(1.0, added)) * (1 - min(1.0, fill))


class StepCost:
    """Learns the seconds that each token adds to a step: the slope of the least-squares line
    through the recent steps' times over their tokens.
    """

    def __init__(self, now: float) -> None:
        self._start = now
        # Faded sums over the steps: weight, and deviations from the means.
        self._weight = self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        # (end, tokens) of the steps of the last WINDOW_S.
        self._steps: deque[tuple[float, int]] = deque()

    def ended(self, tokens: int, seconds: float, now: float) -> None:
        """Adds a step of `tokens` tokens that took `seconds`."""
        self._steps.append((now, tokens))
        self._forget(now)
        # Welford's update, with fading weights.
        self._weight = _FADE * self._weight + 1
        before = tokens - self._tokens
        self._tokens += before / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._variance = _FADE * self._variance + before * (tokens - self._tokens)
        self._covariance = _FADE * self._covariance + before * (seconds - self._seconds)

    @property
    def token_s(self) -> float:
        """Seconds per token. 0 while all steps have the same size; at most the mean time per
        token.
        """
        if self._variance <= 0:
            return 0.0
        slope = self._covariance / self._variance
        return min(max(0.0, slope), self._seconds / self._tokens)

    def added(self, now: float) -> float:
        """Returns the share of the last WINDOW_S that tokens added to steps: 0 to 1."""
        self._forget(now)
        seconds = max(_LEAST_S, min(WINDOW_S, now - self._start))
        return min(1.0, self.token_s * sum(tokens for _, tokens in self._steps) / seconds)

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][0] <= now - WINDOW_S:
            self._steps.popleft()
