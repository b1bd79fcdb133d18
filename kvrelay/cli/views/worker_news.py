"""News about the workers of a cluster, computed from successive states. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.types.workers import EndedWorker

# Polls without the entry of a worker. A worker that stops removes its entry before the controller
# says why it stopped, and a worker that switches its pool has none for a moment.
_CERTAIN = 6


class WorkerNews:
    """Reports once that a worker serves, has stopped for a reason of the controller, or has
    died.
    """

    def __init__(self, states: Mapping[str, str]) -> None:
        """`states`: the state of each worker, of which nothing is to be reported."""
        self._ready = {worker for worker, state in states.items() if state == "ready"}
        # Workers whose end is to be reported.
        self._served = {
            worker for worker, state in states.items() if state in ("ready", "draining")
        }
        self._polls_missing = Counter[str]()

    def is_complete(self, states: Mapping[str, str]) -> bool:
        """Whether each worker that has served is in `states`."""
        return self._served <= states.keys()

    def forget_served(self) -> None:
        """Drops the workers that have served: their common end was reported."""
        self._served.clear()

    def lines(self, states: Mapping[str, str], ended: Mapping[str, EndedWorker]) -> list[str]:
        """Returns the lines to print for the states of one poll: lost workers, new ones, and those
        that stopped for a successor after it. `ended`: what the controller says of workers that
        have ended.
        """
        lost: list[str] = []
        stopped: list[str] = []
        for worker in sorted(self._served):
            if worker in states:
                self._polls_missing.pop(worker, None)
                continue
            self._polls_missing[worker] += 1
            if worker in ended:
                (stopped if ended[worker].drained else lost).append(worker)
            elif self._polls_missing[worker] >= _CERTAIN:
                lost.append(worker)
        for worker in (*lost, *stopped):
            self._served.discard(worker)
            del self._polls_missing[worker]
        ready = {worker for worker, state in states.items() if state == "ready"}
        new = sorted(ready - self._ready)
        self._ready = ready | (self._ready & self._polls_missing.keys())
        self._served |= set(new)
        return [
            *(f"{worker} has died{_reason(worker, ended)}; the log has more" for worker in lost),
            *_replacements(len(lost), bool(ready)),
            *(f"{worker} serves" for worker in new),
            *(f"{worker} has stopped{_reason(worker, ended)}" for worker in stopped),
        ]


def _replacements(num_lost: int, any_serves: bool) -> list[str]:
    if not num_lost:
        return []
    starts = "a new worker starts" if num_lost == 1 else f"{num_lost} new workers start"
    return [starts if any_serves else f"{starts}; no worker serves, so requests wait"]


def _reason(worker: str, ended: Mapping[str, EndedWorker]) -> str:
    return f": {ended[worker].reason}" if worker in ended else ""
