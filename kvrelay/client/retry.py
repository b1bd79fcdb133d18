"""When and where a client calls again. Pure: time is an argument, chance a function."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    KvRelayError,
    ResourceExhausted,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on calling again. `max_attempts` 1 never does.

    The wait before round n of the targets is drawn evenly from [0, min(max_backoff_s,
    initial_backoff_s x 2^(n-1))] ("full jitter"), on top of the delay that the server asked for.
    """

    max_attempts: int = 5  # calls in a row that brought no token
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


class Retry:
    """The calls made for one answer: which target is next, and how long to wait before it."""

    def __init__(
        self,
        policy: RetryPolicy,
        num_targets: int,
        timeout: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """timeout: seconds from the first call on."""
        self._policy = policy
        self._num_targets = num_targets
        self._timeout = timeout
        self._deadline = math.inf  # until the first call
        self._draw = draw
        self._failures = 0  # since the last progress
        self.calls = 0
        self.target = 0  # index of the next call's target

    def begin(self, now: float) -> float:
        """Counts a call; returns its timeout in seconds. Raises DeadlineExceeded if there is no
        time left.
        """
        if not self.calls:
            self._deadline = now + self._timeout
        if now >= self._deadline:
            raise DeadlineExceeded("the deadline passed before the answer was complete")
        self.calls += 1
        return self._deadline - now

    def progress(self) -> None:
        """The call brought something new: whatever fails next is a new failure."""
        self._failures = 0

    def failed(self, error: KvRelayError, now: float) -> float:
        """Seconds to wait before the next call; raises `error` when there is to be none.

        Each target is tried once without waiting; then rounds of all of them follow, with growing
        waits.
        """
        self._failures += 1
        if self._failures >= self._policy.max_attempts or not self._passing(error):
            raise error
        self.target = (self.target + 1) % self._num_targets
        rounds, untried = divmod(self._failures, self._num_targets)
        if untried:
            return 0.0
        backoff = min(
            self._policy.max_backoff_s, self._policy.initial_backoff_s * 2.0 ** min(rounds - 1, 32)
        )
        wait = (error.retry_after_s or 0.0) + backoff * self._draw()
        if now + wait >= self._deadline:
            raise error
        return wait

    def _passing(self, error: KvRelayError) -> bool:
        """Whether the same request may succeed later, or elsewhere."""
        match error:
            case Unavailable() | DataLoss():
                return True
            case ResourceExhausted():
                # Without: a limit, which holds tomorrow as well
                return error.retry_after_s is not None
            case FailedPrecondition():
                # The router has not yet seen that our last call under this id is over
                return self.calls > 1
            case _:
                return False
