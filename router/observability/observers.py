"""Who is told what happens to requests."""

from __future__ import annotations

from typing import Protocol

from kvrelay.process.telemetry import get_logger
from router.observability.metrics import Metrics
from router.runtime.stream import Stream

log = get_logger("router.observers")


class EndObserver(Protocol):
    def ended(self, stream: Stream) -> None: ...


class Observers:
    """An Observer of the driver: of tokens hear the metrics alone, without a step between; of the
    end hear all.

    The metrics are the router's own. What another raises is logged, the first time, and ends
    nothing.
    """

    def __init__(self, metrics: Metrics, *others: EndObserver) -> None:
        self.tokens = metrics.tokens
        self._metrics = metrics
        self._others = others
        self._failed: set[EndObserver] = set()

    def ended(self, stream: Stream) -> None:
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
