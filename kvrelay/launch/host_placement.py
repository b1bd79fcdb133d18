"""Chooses the Ray node of a worker. Pure.

A placement spreads each pool over the nodes first, and all workers second. So the loss of a host
costs either pool as few workers as possible. One reservation covers a whole worker, including all
ranks of its tensor-parallel group: a group is never split between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvrelay.config.pools import Resources
from kvrelay.types.workers import Role

# Most nodes that a reason lists.
_SHOWN = 3
# Tolerance; Ray counts resources in ten-thousandths.
_EXACT = 1e-6

# By Ray's names: CPU, GPU, and the names of custom resources.
Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node that accepts new actors."""

    node_id: str
    # IP address.
    address: str
    total: Amounts
    free: Amounts
    # kvrelay's workers that run on the node or are starting there.
    workers: tuple[Role, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen node, and the reason for the choice."""

    # None: no node has room.
    node: Node | None
    reason: str


def needs(resources: Resources) -> dict[str, float]:
    """Returns the resources that one worker needs."""
    amounts = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    return {name: amount for name, amount in amounts.items() if amount}


def with_workers(nodes: Iterable[Node], workers: Iterable[tuple[str, Role, Amounts]]) -> list[Node]:
    """Returns the nodes with the given workers on them. Each worker is (node id, pool, resources).

    Ray's report of free resources is slightly old and may lack workers that have just started. So
    the free resources of a node are at most its total minus the resources of these workers.
    """
    workers = list(workers)
    result = []
    for node in nodes:
        mine = [(pool, amounts) for node_id, pool, amounts in workers if node_id == node.node_id]
        free = {
            name: min(
                node.free.get(name, 0.0),
                # Ray may have given more than it offers, such as after its node has shrunk.
                max(0.0, total - sum(amounts.get(name, 0.0) for _, amounts in mine)),
            )
            for name, total in node.total.items()
        }
        result.append(replace(node, free=free, workers=tuple(pool for pool, _ in mine)))
    return result


def place(role: Role, amounts: Amounts, nodes: Sequence[Node]) -> Placement:
    """Chooses a node among those with room: the node with the fewest workers of the pool, then the
    node with the fewest workers.
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
    wanted = ", ".join(f"{amount:g} {_name(name, amount)}" for name, amount in amounts.items())
    if not nodes:
        return f"no Ray node is there that has room for {wanted}"
    large_enough = any(_holds(node.total, amounts) for node in nodes)
    lacking = "has room" if large_enough else "is large enough"
    shown = [f"{node.address} has {_offer(node, amounts)}" for node in nodes[:_SHOWN]]
    more = [f"and {len(nodes) - _SHOWN} more nodes"] if len(nodes) > _SHOWN else []
    return f"no Ray node {lacking} for {wanted}: {'; '.join(shown + more)}"


def _offer(node: Node, amounts: Amounts) -> str:
    return ", ".join(
        f"{node.free.get(name, 0.0):g} of {(total := node.total.get(name, 0.0)):g} "
        f"{_name(name, total)} free"
        for name in amounts
    )


def _name(resource: str, amount: float) -> str:
    """Returns the name of a resource. Ray's CPUs are a number to share out, and not cores: a Ray on
    one machine offers enough of them for the largest pools.
    """
    if resource != "CPU":
        return resource
    return "logical CPU" if amount == 1 else "logical CPUs"
