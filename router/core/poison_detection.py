"""Poison-request detection: how likely a request kills its workers."""

from __future__ import annotations

# Delay before the next attempt of a suspect. Other workers may be failing at the same time. In
# seconds.
PAUSE_S = 0.25
# Score from which a request is not retried.
POISON_SCORE = 2.0
# An attempt with more tokens runs well, so the request did not cause the worker's death.
YOUNG_TOKENS = 32
# An attempt must outlive the last attempt by this many tokens, because a dying worker loses some
# computed tokens.
SLACK = 8


class CrashHistory:
    """Unexpected worker deaths of one request, weighted to a score.

    - A death adds 1 if the attempt had made no progress: it had no token, or none beyond the death
      of the last attempt.
    - A death within the first YOUNG_TOKENS tokens adds 0.5, up to a score of 1, because all
      requests on the worker are equally suspect.
    - From 1 on, the request is a suspect. It runs beside no other suspect until it has outlived its
      last death, so the next death finds it the only suspect on the worker.
    - At POISON_SCORE, the request is not retried.

    A request that kills each worker in its first step costs two workers. A request that kills each
    worker a few tokens later costs three. No request that ran beside it fails for that reason.

    A request that kills after more than YOUNG_TOKENS cannot be told from an unlucky request.
    `router.max_attempts` bounds its cost.
    """

    def __init__(self) -> None:
        self.score = 0.0
        # Number of deaths that count.
        self.deaths = 0
        self.not_before = 0.0  # seconds of the router's clock
        # Number of tokens at the last counted death.
        self._died_at: int | None = None

    @property
    def suspected(self) -> bool:
        """Whether the request must not run beside other suspects."""
        return self.score >= 1

    @property
    def is_poison(self) -> bool:
        """Whether the request must not be retried."""
        return self.score >= POISON_SCORE

    def outlived(self, produced: int) -> bool:
        """Whether an attempt with `produced` tokens from its last worker is past the point of the
        last death.
        """
        return produced > (0 if self._died_at is None else self._died_at + SLACK)

    def worker_died(self, produced: int, now: float) -> None:
        """Counts a death of the worker after it produced `produced` tokens of the attempt. A death
        after more than YOUNG_TOKENS tokens resets the score.
        """
        if produced > YOUNG_TOKENS:
            self.score, self.deaths, self._died_at = 0.0, 0, None
            return
        if self.outlived(produced):
            # This case never reaches POISON_SCORE, because other requests ran on the worker too.
            self.score = min(1.0, self.score + 0.5)
        else:
            self.score += 1
            self.not_before = now + PAUSE_S
        self.deaths += 1
        self._died_at = produced if produced > 0 else None
