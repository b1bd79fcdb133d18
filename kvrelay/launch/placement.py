"""Which Ray node a worker is started on. Pure.

Each pool is spread over the nodes first, all workers second, so that a host which is lost takes as
little as possible of either pool with it. One reservation is for a whole worker, with all ranks of
its tensor-parallel group: a group is on one node, or nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvrelay.config.schema import Resources
from kvrelay.types import Role

_SHOWN = 3  # nodes in a reason
_EXACT = 1e-6  # Ray counts in ten-thousandths

Amounts = Mapping[str, float]  # by Ray's names: CPU, GPU, and those of custom resources


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node that takes new actors."""

    node_id: str
    address: str  # IP
    total: Amounts
    free: Amounts
    workers: tuple[Role, ...] = ()  # of ours, that are there or on their way there


@dataclass(frozen=True, slots=True)
class Placement:
    node: Node | None  # None: no node has room
    reason: str


def needs(resources: Resources) -> dict[str, float]:
    """What one worker takes of its node."""
    amounts = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    return {name: amount for name, amount in amounts.items() if amount}


def with_workers(nodes: Iterable[Node], workers: Iterable[tuple[str, Role, Amounts]]) -> list[Node]:
    """The nodes with our workers on them, each given as (node id, pool, what it needs).

    Ray's word on what is free is some moments old: it may lack workers that were just started. So a
    node has no more than what these leave of its total.
    """
    workers = list(workers)
    result = []
    for node in nodes:
        mine = [(pool, amounts) for node_id, pool, amounts in workers if node_id == node.node_id]
        free = {
            name: min(
                node.free.get(name, 0.0), total - sum(amounts.get(name, 0.0) for _, amounts in mine)
            )
            for name, total in node.total.items()
        }
        result.append(replace(node, free=free, workers=tuple(pool for pool, _ in mine)))
    return result


def place(role: Role, amounts: Amounts, nodes: Sequence[Node]) -> Placement:
    """The node with the fewest workers of the pool, of these the one with the fewest workers, of
    those with room.
    """
    roomy = [node for node in nodes if _holds(node.free, amounts)]
    if not roomy:
        return Placement(None, _why_nowhere(amounts, nodes))
    best = min(
        roomy,
        key=lambda node: (node.workers.count(role), len(node.workers), node.address, node.node_id),
    )
    fewest = (
        f"the fewest {role} workers ({best.workers.count(role)}), then workers "
        f"({len(best.workers)})"
    )
    return Placement(best, f"{best.address} has {fewest}, of {len(roomy)} nodes with room")


def _holds(offered: Amounts, amounts: Amounts) -> bool:
    return all(offered.get(name, 0.0) + _EXACT >= amount for name, amount in amounts.items())


def _why_nowhere(amounts: Amounts, nodes: Sequence[Node]) -> str:
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())
    if not nodes:
        return f"no Ray node is there that has room for {wanted}"
    what = "has room" if any(_holds(node.total, amounts) for node in nodes) else "is large enough"
    shown = [f"{node.address} has {_offer(node, amounts)}" for node in nodes[:_SHOWN]]
    more = [f"and {len(nodes) - _SHOWN} more nodes"] if len(nodes) > _SHOWN else []
    return f"no Ray node {what} for {wanted}: {'; '.join(shown + more)}"


def _offer(node: Node, amounts: Amounts) -> str:
    return ", ".join(
        f"{name} {node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} free"
        for name in amounts
    )
