"""What speaks against a request whose workers died under it."""

from __future__ import annotations

PAUSE_S = 0.25  # before the next attempt of a suspect: others may be dying with its worker
GUILTY = 2.0
YOUNG_TOKENS = 32  # an attempt that gave more runs well; what killed its worker came from elsewhere
# Tokens by which an attempt must outlive the last one: some that were computed are lost with their
# worker
SLACK = 8


class Suspicion:
    """Weighs deaths of workers, as far as nobody asked for them, against one request that ran
    there.

    A death counts 1 when the attempt had nothing to show for itself yet: no token, or none beyond
    where the last attempt was ended by a death. One among its first tokens counts a half, up to 1
    in all, since all that ran there are suspected alike. From 1 on the request is a suspect: it
    runs beside no other suspect until it has outlived its last death. So a second or third death
    finds it the only suspect there, and at GUILTY it is not tried again: a request that kills each
    worker with its first step costs two workers, one that does so a few tokens later three, and
    none of those that ran beside it is failed for that.

    A request that kills only after more than YOUNG_TOKENS cannot be told from one with bad luck;
    `router.max_attempts` bounds what it costs.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.deaths = 0  # that count
        self.not_before = 0.0  # seconds of the router's clock
        self._died_at: int | None = None  # tokens that the attempt had given when its worker died

    @property
    def suspected(self) -> bool:
        return self.weight >= 1

    @property
    def guilty(self) -> bool:
        return self.weight >= GUILTY

    def outlived(self, produced: int) -> bool:
        """Whether an attempt whose last worker gave so many tokens is beyond suspicion."""
        return produced > (0 if self._died_at is None else self._died_at + SLACK)

    def worker_died(self, produced: int, now: float) -> None:
        """Under an attempt whose last worker had given so many tokens."""
        if produced > YOUNG_TOKENS:
            self.weight, self.deaths, self._died_at = 0.0, 0, None
            return
        if self.outlived(produced):
            # Which never makes it guilty: others ran there, too
            self.weight = min(1.0, self.weight + 0.5)
        else:
            self.weight += 1
            self.not_before = now + PAUSE_S
        self.deaths += 1
        self._died_at = produced if produced > 0 else None
