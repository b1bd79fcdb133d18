"""Describes workers that wait for room, many of them in one line. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.types.workers import PendingWorker, PoolName
    from kvrelay.wire.cluster import ClusterStatus

_NUMBER = re.compile(r"(\d+)")


def span(names: Iterable[str]) -> str:
    """Returns `decode-2 … decode-98` for many names, in the order of their numbers."""
    ordered = sorted(names, key=_by_numbers)
    if len(ordered) <= 2:
        return ", ".join(ordered)
    return f"{ordered[0]} … {ordered[-1]}"


def _by_numbers(name: str) -> list[tuple[int, str]]:
    # Digits at every second place; a key of at most 18 digits compares fast.
    return [
        (int(part[:18]), "") if index % 2 else (0, part)
        for index, part in enumerate(_NUMBER.split(name))
    ]


def pending_lines(pending: Collection[PendingWorker]) -> Iterator[str]:
    """Yields a line per pool with pending workers, with the most frequent reason."""
    by_pool: dict[str, list[PendingWorker]] = {}
    for worker in pending:
        by_pool.setdefault(worker.pool, []).append(worker)
    for workers in by_pool.values():
        reason = most_frequent(worker.reason for worker in workers)
        if len(workers) == 1:
            yield f"{workers[0].worker_id} is pending: {reason}"
        else:
            names = span(worker.worker_id for worker in workers)
            yield f"{names} are pending, {len(workers)} workers: {reason}"


def most_frequent(reasons: Iterable[str]) -> str:
    """Returns the most frequent of the reasons; the first of several."""
    return Counter(reasons).most_common(1)[0][0]


def are_known(status: ClusterStatus, sizes: Mapping[PoolName, int]) -> bool:
    """Whether each of the wanted workers has started, or has found no room."""
    return all(
        len(pool.workers) + len(_waiting(status, pool.name)) >= sizes.get(pool.name, 0)
        for pool in status.pools
    )


def room_lines(status: ClusterStatus, sizes: Mapping[PoolName, int]) -> Iterator[str]:
    """Yields a line per pool with wanted workers that found no room: how many, and how many can
    start.

    sizes: the wanted sizes of the pools. Their status may still have the old ones.
    """
    started = {pool.name: len(pool.workers) for pool in status.pools}
    for pool, wanted in sizes.items():
        if waiting := _waiting(status, pool):
            reason = most_frequent(worker.reason for worker in waiting)
            room, known = max(0, wanted - len(waiting)), started.get(pool, 0)
            if known < room:
                # The controller has not asked for the others yet, or they are about to start.
                yield (
                    f"{pool}: {known} of {wanted} workers have started so far, and {len(waiting)} "
                    f"wait for room: {reason}; `kvrelay status` shows the others"
                )
            else:
                yield (
                    f"{pool}: there is room for {room} of {wanted} workers, and {len(waiting)} "
                    f"wait for it: {reason}; set {pool}={room}, or add a node to the Ray cluster"
                )


def unknown_lines(status: ClusterStatus, sizes: Mapping[PoolName, int]) -> Iterator[str]:
    """Yields a line per pool with wanted workers that have neither started nor found no room. The
    line of `room_lines` tells of the pools in which others found none.
    """
    for pool in status.pools:
        wanted = sizes.get(pool.name, 0)
        if len(pool.workers) < wanted and not _waiting(status, pool.name):
            yield (
                f"{pool.name}: {len(pool.workers)} of {wanted} workers have started so far; "
                "`kvrelay status` shows the others"
            )


def _waiting(status: ClusterStatus, pool: PoolName) -> list[PendingWorker]:
    return [worker for worker in status.pending if worker.pool == pool]
