"""How fast requests leave the queue, and how long they are served: what an estimate of a wait is
made of.
"""

from __future__ import annotations

from math import exp

WINDOW_S = 10.0  # of time with a queue, over which the past fades
EVIDENCE = 3.0  # requests that must have left in it
SHARE = 1 / 32  # of the last answer in the means


class Throughput:
    """Seconds are the router's clock's. The rate is that of the time in which requests waited for
    room, and no other.

    It counts requests, not tokens: what frees a place in a full cluster is that some request ends,
    and the mix that comes next is the mix that was served.
    """

    def __init__(self) -> None:
        self._left = 0.0
        self._busy_s = 0.0
        self._at: float | None = None  # up to when time is counted, while there is a queue
        self.seconds = 0.0  # from workers to the end, mean of the last answers
        self.answer_tokens = 0.0  # of these
        self.tokens = 0.0  # of these with their prompts
        self._max_tokens = 0.0  # that they might have had

    @property
    def queued(self) -> bool:
        """Whether requests were waiting for room when that was last looked at."""
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
        """From now on there is a queue, or none."""
        self.advance(now)
        self._at = now if queued else None

    def forget_rate(self) -> None:
        """There are other workers now than those that it was measured with."""
        self._left = self._busy_s = 0.0

    def left_queue(self) -> None:
        """A request was given workers; it counts if it had waited for them."""
        if self._at is not None:
            self._left += 1

    @property
    def per_second(self) -> float | None:
        """Requests that leave the queue; None as long as too few have."""
        return self._left / self._busy_s if self._left >= EVIDENCE and self._busy_s > 0 else None

    def finished(
        self, seconds: float, prompt_tokens: int, answer_tokens: int, max_tokens: int
    ) -> None:
        share = SHARE if self.tokens else 1.0
        self.seconds += (seconds - self.seconds) * share
        self.answer_tokens += (answer_tokens - self.answer_tokens) * share
        self.tokens += (prompt_tokens + answer_tokens - self.tokens) * share
        self._max_tokens += (max_tokens - self._max_tokens) * share

    def service_s(self, max_tokens: int) -> float:
        """How long a request with room for so many tokens will be served; 0 if nothing is known.

        Its answer is taken to be as long as answers are, or to use as much of its room as they do,
        if that is more.
        """
        if not self.answer_tokens:
            return 0.0
        expected = max(
            min(max_tokens, self.answer_tokens), max_tokens * self.answer_tokens / self._max_tokens
        )
        return self.seconds * expected / self.answer_tokens
