"""Distribution of request events to observers."""

from __future__ import annotations

from typing import Protocol

from kvrelay.process.telemetry import get_logger
from router.observability.metrics import Metrics
from router.runtime.stream import Stream

log = get_logger("router.observers")


class EndObserver(Protocol):
    """Receives ended requests."""

    def ended(self, stream: Stream) -> None:
        """Handles the end of a request."""
        ...


class Observers:
    """An Observer of the driver. Token events go to the metrics only, without an intermediate call;
    end events go to all observers.

    The metrics are part of the router, so their errors propagate. The first error of each other
    observer is logged, and its errors stop nothing.
    """

    def __init__(self, metrics: Metrics, *others: EndObserver) -> None:
        self.tokens = metrics.tokens
        self._metrics = metrics
        self._others = others
        self._failed: set[EndObserver] = set()

    def ended(self, stream: Stream) -> None:
        """Passes the end of a request to all observers."""
        self._metrics.ended(stream)
        for one in self._others:
            try:
                one.ended(stream)
            except Exception:
                if one not in self._failed:
                    self._failed.add(one)
                    log.exception(
                        "observer_failed",
                        observer=type(one).__name__,
                    )
