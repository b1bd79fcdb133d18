"""How far a rolling restart is, from one status to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrelay.errors import Unavailable

if TYPE_CHECKING:
    from kvrelay.wire.cluster import ClusterStatus


_CERTAIN = 5  # statuses; a router may show a worker that is gone for a moment longer


class RestartProgress:
    """Says of each worker once what it has come to. A worker whose restart is no longer asked for,
    and which is still there, was forgotten: the request lies in Redis, and Redis may have been
    started anew.
    """

    def __init__(self, worker_ids: Sequence[str]) -> None:
        self._left = list(worker_ids)
        self._all = len(worker_ids)
        self._said: dict[str, str] = {}
        self._doubts = Counter[str]()
        self._forgotten: list[str] = []

    @property
    def over(self) -> bool:
        return not self._left

    def news(self, status: ClusterStatus) -> list[str]:
        """Lines to print."""
        states: dict[str, str] = {one.worker_id: one.state for one in status.standby}
        states |= {
            worker.worker_id: worker.state for pool in status.pools for worker in pool.workers
        }
        lines = []
        for worker_id in list(self._left):
            if status.registry == "ok" and worker_id not in status.restarting:
                if states.get(worker_id) == "ready":
                    self._doubts[worker_id] += 1
                    if self._doubts[worker_id] == _CERTAIN:
                        self._left.remove(worker_id)
                        self._forgotten.append(worker_id)
                    continue
                self._left.remove(worker_id)
                word = f"replaced, {self._all - len(self._left)} of {self._all}"
            else:
                word = (
                    "drains" if states.get(worker_id) == "draining" else "waits for its successor"
                )
            if self._said.get(worker_id) != word:
                self._said[worker_id] = word
                lines.append(f"{worker_id}: {word}")
        return lines

    def check(self) -> None:
        """Raises Unavailable if workers were left as they were."""
        if self._forgotten:
            raise Unavailable(
                f"not restarted: {', '.join(self._forgotten)}; the cluster forgot the request, so "
                f"ask again"
            )
