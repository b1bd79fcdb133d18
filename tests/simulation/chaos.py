"""Who does the faults, and what they have in common."""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass

from simulation.cluster import Cluster
from simulation.controller import Member

from kvrelay.types.workers import PoolName


@dataclass
class Chaos:
    """Does faults to a cluster."""

    cluster: Cluster
    rng: random.Random
    router_died: Callable[[], None] = lambda: None

    def pick(self, pool: PoolName | None = None) -> Member | None:
        living = [one for one in self.cluster.living(pool) if one.worker is not None]
        return self.rng.choice(living) if living else None

    def later(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """From outside: whatever has happened by then to the process that this is called in."""
        self.cluster.loop.call_later(seconds, call, *args, context=contextvars.Context())

    def seconds(self, least: float, most: float) -> float:
        """Short ones are likelier."""
        return least + (most - least) * self.rng.random() ** 2

    def kill(self, member: Member | None, kind: str) -> None:
        if member is not None and member.process.alive:
            self.cluster.note(kind, loses_worker=True)
            self.cluster.network.say(f"FAULT {member.worker_id} is killed")
            self.cluster.kill(member.process)

    def heal(self) -> None:
        """Whatever is left of faults is over."""
        cluster = self.cluster
        cluster.network.tampers.clear()
        cluster.network.slow.clear()
        for source, target in list(cluster.network._cuts):
            cluster.network.heal(source, target)
        cluster.redis.state = "ok"
