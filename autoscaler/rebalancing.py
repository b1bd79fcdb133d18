"""Selection of surplus workers and of workers that switch pools. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvrelay.types.workers import WorkerInfo


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """A pool of wanted size `size`, with the workers that stay in it or are switching to it."""

    size: int
    staying: Collection[str]
    # Workers of `staying` that have been ready.
    serving: Collection[str]
    # Workers of `staying` that no node has room for yet.
    pending: Collection[str]

    @property
    def placed(self) -> list[str]:
        """Workers of `staying` that have a place on a node."""
        return [one for one in self.staying if one not in self.pending]

    @property
    def spare(self) -> int:
        """Number of workers above the wanted size."""
        return max(0, len(self.staying) - self.size)


def workers_to_switch(
    giver: PoolWorkers, taker: PoolWorkers, infos: Mapping[str, WorkerInfo]
) -> list[str]:
    """Returns the workers that switch from the giver to the taker: the giver would stop them, and
    the taker would start as many. They also replace the taker's pending workers.
    """
    missing = taker.size - (len(taker.staying) - len(taker.pending))
    switching = [
        one
        for one in surplus(giver.staying, giver.serving, infos, giver.spare)
        if one in giver.serving
    ]
    return switching[: max(0, missing)]


def surplus(
    staying: Collection[str], serving: Collection[str], infos: Mapping[str, WorkerInfo], count: int
) -> list[str]:
    """Returns the `count` workers to stop first: starting workers, then those with the least load,
    then those with the fewest cached blocks, then the newest.
    """

    def cost(worker_id: str) -> tuple[bool, float, int, int]:
        info = infos.get(worker_id)
        held = (
            math.inf if info is None else info.load.running + info.load.waiting + info.load.leases
        )
        cached = 0 if info is None else info.load.blocks_cached
        return worker_id in serving, held, cached, -number_of(worker_id)

    return sorted(staying, key=cost)[: max(0, count)]


def standbys_to_join(standbys: Collection[str], ready: Collection[str], count: int) -> list[str]:
    """Returns the `count` standby workers that join a pool soonest: ready workers, then the
    oldest.
    """
    return sorted(standbys, key=lambda worker_id: (worker_id not in ready, number_of(worker_id)))[
        :count
    ]


def number_of(worker_id: str) -> int:
    """Returns the number at the end of a worker's name, which grows with each start. 0 for other
    names.
    """
    number = worker_id.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdecimal() else 0
