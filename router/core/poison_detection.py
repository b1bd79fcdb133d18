"""Poison-request detection: how likely a request kills its workers."""

from __future__ import annotations

# Delay before the next attempt of a suspect. Other workers may be failing at the same time. In
# seconds.
PAUSE_S = 0.25
GUILTY = 2.0
# An attempt with more tokens runs well, so the request did not cause the worker's death.
YOUNG_TOKENS = 32
# An attempt must outlive the last attempt by this many tokens, because a dying worker loses some
# computed tokens.
SLACK = 8


class Suspicion:
    """Suspicion score of one request: a weighted count of unexpected worker deaths.

    - A death adds 1 if the attempt had made no progress: it had no token, or none beyond the death
      of the last attempt.
    - A death within the first YOUNG_TOKENS tokens adds 0.5, up to a score of 1, because all
      requests on the worker are equally suspect.
    - From 1 on, the request is a suspect. It runs beside no other suspect until it has outlived its
      last death, so the next death finds it the only suspect on the worker.
    - At GUILTY, the request is not retried.

    A request that kills each worker in its first step costs two workers. A request that kills each
    worker a few tokens later costs three. No request that ran beside it fails for that reason.

    A request that kills after more than YOUNG_TOKENS cannot be told from an unlucky request.
    `router.max_attempts` bounds its cost.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        # Number of deaths that count.
        self.deaths = 0
        self.not_before = 0.0  # seconds of the router's clock
        # Number of tokens at the last counted death.
        self._died_at: int | None = None

    @property
    def suspected(self) -> bool:
        """Whether the request must not run beside other suspects."""
        return self.weight >= 1

    @property
    def guilty(self) -> bool:
        """Whether the request must not be retried."""
        return self.weight >= GUILTY

    def outlived(self, produced: int) -> bool:
        """Whether an attempt with `produced` tokens from its last worker has cleared the
        suspicion.
        """
        return produced > (0 if self._died_at is None else self._died_at + SLACK)

    def worker_died(self, produced: int, now: float) -> None:
        """Counts a death of the worker after it produced `produced` tokens of the attempt. A death
        after more than YOUNG_TOKENS tokens resets the score.
        """
        if produced > YOUNG_TOKENS:
            self.weight, self.deaths, self._died_at = 0.0, 0, None
            return
        if self.outlived(produced):
            # This case never reaches GUILTY, because other requests ran on the worker too.
            self.weight = min(1.0, self.weight + 0.5)
        else:
            self.weight += 1
            self.not_before = now + PAUSE_S
        self.deaths += 1
        self._died_at = produced if produced > 0 else None
