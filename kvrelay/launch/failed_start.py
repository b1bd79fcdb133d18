"""Decides what to do about workers that fail before any worker of the cluster has served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.errors import Internal, InvalidArgument, KvRelayError, NotFound, Unavailable
from kvrelay.types.workers import Role, WorkerInfo

MOST_DEATHS = 4
"""Workers that may end before one has served, for reasons that another start may cure, such as
short memory.
"""

_CURABLE = (ConnectionError, TimeoutError, MemoryError)


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A worker that ended before it could serve."""

    worker_id: str
    # One line.
    reason: str
    # An error that no restart can fix; None if a restart may help.
    error: KvRelayError | None = None


@dataclass(frozen=True, slots=True)
class RefusedStart:
    """A worker whose model or configuration cannot be served in its role on its node."""

    role: Role
    error: InvalidArgument

    def concerns_all(self, workers: Iterable[WorkerInfo]) -> bool:
        """Whether no worker is ready in the role. If another worker is, the cause is the node of
        the refusing worker. Workers of the other pool load other models, such as no draft model.
        """
        return not any(
            info.state == "ready" and self.role in ("standby", info.pool) for info in workers
        )


def failed_start(worker_id: str, cause: BaseException | None, words: str) -> FailedStart:
    """Classifies a worker that ended with `cause`, or whose process disappeared (`cause` is None).
    `words` is Ray's message.

    A bug, a missing file or a full disk fails again with each start.
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
    """Counts failed starts and decides when further attempts are pointless."""

    def __init__(self) -> None:
        self._deaths = 0

    def verdict(self, failed: FailedStart) -> KvRelayError | None:
        """Returns the error to end with, or None to continue."""
        if failed.error is not None:
            return failed.error
        self._deaths += 1
        if self._deaths < MOST_DEATHS:
            return None
        return Unavailable(
            f"{self._deaths} workers ended before one could serve; {failed.worker_id}: "
            f"{failed.reason.rstrip('. ')}; if memory was short, lower kv.memory or the number of "
            "workers"
        )
