"""How much of a worker's time the grammars of one tenant may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvrelay.engine.sampling.grammar import refusal
from kvrelay.errors import InvalidArgument

# What is usual, in seconds of processor time, and free: for each mask, for each step or call, and
# for each token that is taken in without a mask. A mask usually takes 0.02 to 0.2 ms.
MASK_S, CALL_S, TOKEN_S = 0.0005, 0.005, 0.00005
# What a tenant's grammars may take beyond that at once, and the share of the time by which it
# comes back.
STORE_S, REFILL = 0.5, 0.05


class GrammarTime:
    """Time beyond the usual that the grammars of one tenant may take. The steps of all tenants wait
    for it, so it is bounded per tenant, not per sequence. Safe to call from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Below zero after a call that took more than was left.
        self._left = STORE_S
        self._at = clock()
        self._lock = threading.Lock()

    def take(self, seconds: float) -> bool:
        """Takes time beyond the usual. Returns whether any is left, or none was taken."""
        with self._lock:
            now = self._clock()
            self._left = min(STORE_S, self._left + REFILL * (now - self._at)) - seconds
            self._at = now
            return seconds == 0 or self._left > 0

    @property
    def is_over(self) -> bool:
        """Whether no time beyond the usual is left."""
        self.take(0)
        return self._left <= 0


class Spending:
    """What the grammars of one tenant take in one step or call."""

    def __init__(self, allowance: GrammarTime, usual_s: float) -> None:
        """usual_s: seconds that are free."""
        self._allowance = allowance
        self._free = usual_s

    def add(self, seconds: float) -> bool:
        """Adds time as it is taken. Returns False if the tenant may not take that."""
        over = max(0.0, seconds - self._free)
        self._free = max(0.0, self._free - seconds)
        return self._allowance.take(over)


def too_slow(seconds: float) -> InvalidArgument:
    """Returns the error of a sequence whose grammar takes too long for a token."""
    return refusal(
        f"it took {1000 * seconds:.1f} ms for one token, and the tenant's grammars have taken all "
        "of the time that they may; use rules with one meaning and shorter patterns"
    )
