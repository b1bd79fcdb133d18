"""Who is told what happens to requests."""

from __future__ import annotations

from typing import Protocol

from router.metrics import Metrics
from router.stream import Stream


class EndObserver(Protocol):
    def ended(self, stream: Stream) -> None: ...


class Observers:
    """An Observer of the driver: of tokens hear the metrics alone, without a step between; of the end hear all."""

    def __init__(self, metrics: Metrics, *others: EndObserver) -> None:
        self.tokens = metrics.tokens
        self._told: tuple[EndObserver, ...] = (metrics, *others)

    def ended(self, stream: Stream) -> None:
        for one in self._told:
            one.ended(stream)
