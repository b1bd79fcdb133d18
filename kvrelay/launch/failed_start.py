"""What to make of workers that end in an error before any worker of the cluster has served."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import Internal, KvRelayError, NotFound, Unavailable

MOST_DEATHS = 4
"""Workers that may end, before one has served, of what another start may cure, such as memory that
was short.
"""

_CURABLE = (ConnectionError, TimeoutError, MemoryError)


@dataclass(frozen=True, slots=True)
class FailedStart:
    worker_id: str
    reason: str  # in one line
    error: KvRelayError | None = None  # what no other start would cure; None where one may


def failed_start(worker_id: str, cause: BaseException | None, words: str) -> FailedStart:
    """Of a worker that ended with `cause`, or whose process has just gone; `words` are what Ray
    says of it.

    An error of the code, a file that is missing or a disk that is full come back with each start.
    """
    reason = next(iter(words.strip().splitlines()), "") or "its process ended"
    if isinstance(cause, NotFound):
        return FailedStart(worker_id, cause.message, cause)
    if (
        cause is None
        or isinstance(cause, (KvRelayError, *_CURABLE))
        or not isinstance(cause, Exception)
    ):
        return FailedStart(worker_id, reason)
    reason = f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), ''):.300}"
    return FailedStart(
        worker_id, reason, Internal(f"{worker_id} failed before it could serve: {reason}")
    )


class FailedStarts:
    """Counts them until there is no point in another one."""

    def __init__(self) -> None:
        self._deaths = 0

    def verdict(self, failed: FailedStart) -> KvRelayError | None:
        """The error to end with, or None to go on."""
        if failed.error is not None:
            return failed.error
        self._deaths += 1
        if self._deaths < MOST_DEATHS:
            return None
        return Unavailable(
            f"{self._deaths} workers ended before one could serve, {failed.worker_id} with: "
            f"{failed.reason} If memory was short, set kv.memory or the number of workers lower"
        )
