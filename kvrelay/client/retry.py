"""When a client retries, and at which target. Pure: time is an argument, randomness a function."""

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
from kvrelay.wire.status import is_answer

# The longest timeout of a call. gRPC treats much longer timeouts as expired.
_LONGEST_S = 1e8


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on retries. With `max_attempts` 1 there are none.

    The wait before round n of the targets is drawn uniformly from [0, min(max_backoff_s,
    initial_backoff_s x 2^(n-1))] ("full jitter") and added to the delay that the server asked for.
    """

    # Consecutive calls without a new token. Unless it is 1, each target gets at least one.
    max_attempts: int = 5
    # Calls in a row that end as Unavailable, once a router has answered the client. It covers the
    # restart of a router, and has no effect if max_attempts is 1.
    max_reconnects: int = 12
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


class Retry:
    """The calls made for one answer: the next target, and the wait before the call."""

    def __init__(
        self,
        policy: RetryPolicy,
        num_targets: int,
        timeout: float,
        *,
        is_known: bool = False,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """
        - timeout: seconds from the first call.
        - is_known: a target has answered this client before, so it may be back soon.
        - draw: returns a random number in [0, 1).
        """
        self._policy = policy
        self._num_targets = num_targets
        self._timeout = timeout
        # Set by the first call.
        self._deadline = math.inf
        self._draw = draw
        self._is_known = is_known
        # Consecutive failures since the last progress.
        self._failures = 0
        # The last of these that came from a server.
        self._answer: KvRelayError | None = None
        # The delays in seconds that the targets of this round have asked for; 0 for none.
        self._delays: list[float] = []
        self.calls = 0
        # Index of the target of the next call.
        self.target = 0

    def begin(self, now: float) -> float:
        """Counts a call and returns its timeout in seconds. Raises DeadlineExceeded if no time is
        left.
        """
        if not self.calls:
            self._deadline = now + self._timeout
        if now >= self._deadline:
            raise DeadlineExceeded("the deadline passed before the answer was complete")
        self.calls += 1
        return min(self._deadline - now, _LONGEST_S)

    def progress(self) -> None:
        """Resets the count of failures, because the call brought something new."""
        self._is_known = True
        self._failures = 0
        self._answer = None
        self._delays = []

    def failed(self, error: KvRelayError, now: float) -> float:
        """Returns the seconds to wait before the next call. When there is no further call, raises
        `error`, or what another target answered if this target did not.

        Each target is tried once without a wait. Then the rounds over all targets follow, with
        growing waits, each after the shortest delay that a target of the last round asked for. If
        that is beyond the deadline, the delays count only if all targets asked for one.
        """
        self._failures += 1
        if is_answer(error):
            self._answer = error
        self._delays.append(error.retry_after_s or 0.0)
        most = self._policy.max_attempts
        if most > 1:
            is_patient = self._is_known and isinstance(error, Unavailable)
            most = max(most, self._num_targets, self._policy.max_reconnects if is_patient else 0)
        if self._failures >= most or not self._passing(error):
            raise self._told(error)
        self.target = (self.target + 1) % self._num_targets
        rounds, untried = divmod(self._failures, self._num_targets)
        if untried:
            return 0.0
        backoff = min(
            self._policy.max_backoff_s, self._policy.initial_backoff_s * 2.0 ** min(rounds - 1, 32)
        )
        backoff *= self._draw()
        delays, self._delays = self._delays, []
        wait = backoff + min((one for one in delays if one), default=0.0)
        if now + wait >= self._deadline and not all(delays):
            wait = backoff
        if now + wait >= self._deadline:
            raise self._told(error)
        return wait

    def _told(self, error: KvRelayError) -> KvRelayError:
        """Returns what another target answered, if this one did not; else `error`."""
        return (self._answer if self._num_targets > 1 else None) or error

    def _passing(self, error: KvRelayError) -> bool:
        """Whether the same request may succeed later or at another target."""
        match error:
            case Unavailable() | DataLoss():
                return True
            case ResourceExhausted():
                # Without retry_after_s, the limit is permanent.
                return error.retry_after_s is not None
            case FailedPrecondition():
                # The router has not yet noticed that the last call with this request id has ended.
                return self.calls > 1
            case _:
                return False
