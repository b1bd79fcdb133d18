"""Counts and logs the errors of a tier."""

from __future__ import annotations

from kvrelay.process.telemetry import get_logger
from kvrelay.worker.tiers.tier import TierCounts

log = get_logger("worker")


def note_error(counts: TierCounts, kind: str, what: str, reason: str) -> None:
    """Counts an error, and logs the first, second, fourth and so on of its kind, since a broken
    disk fails with each block. `what` names the operation that failed.
    """
    counts.errors += 1
    counts.error = reason[:200]
    times = counts.by_reason[what] = counts.by_reason.get(what, 0) + 1
    if times & (times - 1) == 0:
        log.warning("kv_tier_error", tier=kind, operation=what, times=times, reason=reason)


def reason_of(error: OSError) -> str:
    """What went wrong, without the name of a file, which differs each time."""
    return error.strerror or str(error) or type(error).__name__
