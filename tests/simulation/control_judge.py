"""The judge of the control plane's simulation: one leader, and pools of the wanted sizes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.control_faults import POLL_S
from simulation.history import Act, judge_leaders

from kvrelay.types.workers import POOLS, PoolName

if TYPE_CHECKING:
    from simulation.control import ControlSimulation

SURGE = 1  # a worker that is to replace another


class Acts(list[Act]):
    """Each is judged as it takes effect."""

    def __init__(self, judge: Callable[[Act], None]) -> None:
        self._judge = judge

    def append(self, act: Act) -> None:
        super().append(act)
        self._judge(act)


class ControlJudge:
    """Adds what is wrong to the simulation's complaints."""

    def __init__(self, simulation: ControlSimulation, largest_decode: int) -> None:
        """`largest_decode` is how many decode workers the policy allows."""
        self._sim = simulation
        self._largest_decode = largest_decode

    def act(self, act: Act) -> None:
        """An act takes effect now."""
        sim = self._sim
        who = f"{act.owner} in term {act.term}: {act.what}"
        sim.network.say(f"ACT {who}")
        others = [
            one.name
            for one in sim.leaders()
            if one.lease is not None and one.lease.owner != act.owner
        ]
        if others:
            sim.complaints.append(f"E: {who} at {act.time:.3f} while {others[0]} leads")
        self._now()

    async def watch(self) -> None:
        """Judges at intervals, until it is cancelled."""
        while True:
            self._now()
            await asyncio.sleep(POLL_S)

    def end(self) -> None:
        """Everything has healed, and there was time to settle."""
        sim = self._sim
        leaders = sim.leaders()
        if len(leaders) != 1:
            sim.complaints.append(f"L: {len(leaders)} controllers lead at the end")
        if sim.fleet:
            now = sim.loop.time()
            wanted = {pool: self._wanted(pool) for pool in POOLS}
            found = {pool: len(self._serving(pool, now)) for pool in POOLS}
            if wanted != found:
                sim.complaints.append(f"F: at the end {found} serve, wanted are {wanted}")

    def _now(self) -> None:
        sim = self._sim
        now = sim.loop.time()
        sim.complaints += judge_leaders(now, [one.name for one in sim.leaders()])
        if sim.fleet:
            self._fleet(now)

    def _fleet(self, now: float) -> None:
        sim = self._sim
        most = {"decode": self._largest_decode, "prefill": max(sim.sizes["prefill"], sim.operated)}
        for pool in POOLS:
            serving = self._serving(pool, now)
            if len(serving) > most[pool] + SURGE:
                sim.complaints.append(
                    f"F: {len(serving)} {pool} workers serve at {now:.3f}, wanted are {most[pool]}"
                )

    def _serving(self, pool: PoolName, now: float) -> list[str]:
        """Registered workers that may be given work, and that nobody has had to give up for being
        cut off.
        """
        return [
            worker.worker_id
            for controller in self._sim.living()
            for worker in controller.workers.values()
            if worker.pool == pool
            and worker.process.alive
            and worker.registered
            and not worker.draining
            and now >= worker.unseen_until
        ]

    def _wanted(self, pool: PoolName) -> int:
        raw = self._sim.redis.store.values.get(b"kvrelay:desired", {}).get(pool.encode())
        return 0 if raw is None else int(json.loads(raw)["value"]["replicas"])
