"""Measured rate at which requests leave the queue, and measured service time. They are the inputs
of wait estimates.
"""

from __future__ import annotations

from math import exp

# Time constant of the rate, in time with a queue.
WINDOW_S = 10.0
# Number of departures in the window that a rate needs.
EVIDENCE = 3.0
# Weight of the last answer in the means.
SHARE = 1 / 32


class Throughput:
    """Running estimates, in seconds of the router's clock. The rate covers only the time in which
    requests waited for room.

    It counts requests instead of tokens: in a full cluster, a place becomes free when a request
    ends, and the mix of the next requests equals the mix that was served.
    """

    def __init__(self) -> None:
        self._left = 0.0
        self._busy_s = 0.0
        # Time up to which the queue time is counted. None while there is no queue.
        self._at: float | None = None
        # Mean time from placement to end over the last answers.
        self.seconds = 0.0
        # Mean answer tokens over the same answers.
        self.answer_tokens = 0.0
        # Mean tokens of prompt and answer over the same answers.
        self.tokens = 0.0
        # Mean max_tokens over the same answers.
        self._max_tokens = 0.0

    @property
    def queued(self) -> bool:
        """Whether requests waited for room at the last check."""
        return self._at is not None

    def advance(self, now: float) -> None:
        """Counts the time since the last call, if there was a queue."""
        if self._at is not None:
            elapsed = max(0.0, now - self._at)
            fading = exp(-elapsed / WINDOW_S)
            self._left *= fading
            self._busy_s = self._busy_s * fading + elapsed
            self._at = now

    def watch(self, now: float, queued: bool) -> None:
        """Records whether there is a queue from now on."""
        self.advance(now)
        self._at = now if queued else None

    def forget_rate(self) -> None:
        """Resets the rate, because the set of workers has changed."""
        self._left = self._busy_s = 0.0

    def left_queue(self) -> None:
        """Counts a request that got workers, if there was a queue."""
        if self._at is not None:
            self._left += 1

    @property
    def per_second(self) -> float | None:
        """Requests per second that leave the queue. None without enough evidence."""
        return self._left / self._busy_s if self._left >= EVIDENCE and self._busy_s > 0 else None

    def finished(
        self, seconds: float, prompt_tokens: int, answer_tokens: int, max_tokens: int | None
    ) -> None:
        """Adds a finished answer to the means. `seconds` is its time with workers; `max_tokens` is
        None for an answer without a bound.
        """
        share = SHARE if self.tokens else 1.0
        self.seconds += (seconds - self.seconds) * share
        self.answer_tokens += (answer_tokens - self.answer_tokens) * share
        self.tokens += (prompt_tokens + answer_tokens - self.tokens) * share
        bound = answer_tokens if max_tokens is None else max_tokens
        self._max_tokens += (bound - self._max_tokens) * share

    def service_s(self, max_tokens: int | None) -> float:
        """Returns the estimated service time in seconds of a request with `max_tokens`. 0 if
        unknown.

        The estimated answer is as long as the mean answer (at most `max_tokens`), or uses the mean
        fraction of max_tokens, whichever is longer. Without `max_tokens`, it is the mean answer.
        """
        if not self.answer_tokens:
            return 0.0
        if max_tokens is None:
            return self.seconds
        expected = max(
            min(max_tokens, self.answer_tokens), max_tokens * self.answer_tokens / self._max_tokens
        )
        return self.seconds * expected / self.answer_tokens
