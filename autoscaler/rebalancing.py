"""Which workers a pool can do without, and which of them the other pool gets. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvrelay.types import WorkerInfo


@dataclass(frozen=True, slots=True)
class Members:
    """A pool that shall have `size` workers, and those that stay in it or are on their way from the
    other one.
    """

    size: int
    staying: Collection[str]
    serving: Collection[str]  # of these, those that have been ready
    pending: Collection[str]  # of these, those that no node has room for yet

    @property
    def spare(self) -> int:
        return max(0, len(self.staying) - self.size)


def changing_over(giver: Members, taker: Members, infos: Mapping[str, WorkerInfo]) -> list[str]:
    """Workers that the giver would stop and the taker would start: they change over, in place of
    what has no room.
    """
    missing = taker.size - (len(taker.staying) - len(taker.pending))
    goers = [
        one
        for one in surplus(giver.staying, giver.serving, infos, giver.spare)
        if one in giver.serving
    ]
    return goers[: max(0, missing)]


def surplus(
    staying: Collection[str], serving: Collection[str], infos: Mapping[str, WorkerInfo], count: int
) -> list[str]:
    """The `count` workers that are missed least: those that are still starting, then the emptiest,
    the latest first.
    """

    def cost(worker_id: str) -> tuple[bool, float, int, int]:
        info = infos.get(worker_id)
        held = (
            math.inf if info is None else info.load.running + info.load.waiting + info.load.leases
        )
        cached = 0 if info is None else info.load.blocks_cached
        return worker_id in serving, held, cached, -number_of(worker_id)

    return sorted(staying, key=cost)[: max(0, count)]


def joiners(standbys: Collection[str], ready: Collection[str], count: int) -> list[str]:
    """The `count` standby workers that join a pool soonest: those that are ready, then the
    oldest.
    """
    return sorted(standbys, key=lambda worker_id: (worker_id not in ready, number_of(worker_id)))[
        :count
    ]


def number_of(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
