"""Progress of a rolling restart, computed from successive statuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrelay.cli.views.pending_workers import most_frequent
from kvrelay.errors import Unavailable

if TYPE_CHECKING:
    from kvrelay.wire.cluster import ClusterStatus


# Statuses. A router may briefly show a worker that has ended.
_CERTAIN = 5


class RestartProgress:
    """Reports each change of a worker once. A worker that is ready, while its restart is no longer
    requested, was forgotten: the request is in Redis, and Redis may have restarted.
    """

    def __init__(self, worker_ids: Sequence[str]) -> None:
        self._left = list(worker_ids)
        self._all = len(worker_ids)
        self._said: dict[str, str] = {}
        self._doubts = Counter[str]()
        self._forgotten: list[str] = []

    @property
    def over(self) -> bool:
        """Whether each worker was replaced or forgotten."""
        return not self._left

    @property
    def summary(self) -> str:
        """How many workers were replaced, and which are left."""
        done = self._all - len(self._left) - len(self._forgotten)
        left = f", not yet {', '.join(self._left)}" if self._left else ""
        return f"{done} of {self._all} workers replaced{left}"

    def news(self, status: ClusterStatus) -> list[str]:
        """Returns the lines to print for a new status."""
        states: dict[str, str] = {one.worker_id: one.state for one in status.standby}
        states |= {
            worker.worker_id: worker.state for pool in status.pools for worker in pool.workers
        }
        lines: list[str] = []
        if status.registry != "ok":
            # What the status knows may be old.
            return lines
        reasons = [one.reason for one in status.pending]
        for worker_id in list(self._left):
            if worker_id not in status.restarting:
                if states.get(worker_id) == "ready":
                    self._doubts[worker_id] += 1
                    if self._doubts[worker_id] == _CERTAIN:
                        self._left.remove(worker_id)
                        self._forgotten.append(worker_id)
                    continue
                self._left.remove(worker_id)
                word = f"replaced, {self._all - len(self._left)} of {self._all}"
            elif worker_id not in states:
                word = "stopped"
            elif states[worker_id] == "draining":
                word = "draining, its successor serves"
            else:
                word = "waiting until its successor is ready"
                if reasons:
                    word += f", which waits for room: {most_frequent(reasons)}"
            if self._said.get(worker_id) != word:
                self._said[worker_id] = word
                lines.append(f"{worker_id}: {word}")
        return lines

    def check(self) -> None:
        """Raises Unavailable if workers were not restarted."""
        if self._forgotten:
            raise Unavailable(
                f"not restarted: {', '.join(self._forgotten)}; the cluster lost the request, so "
                "run the command again"
            )
