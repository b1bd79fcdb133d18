"""The simulated controller: kills workers as planned, replaces dead ones, and scales the pools by
the production policy.
"""

from __future__ import annotations

from autoscaler.look_ahead import look_ahead
from autoscaler.pool_sizes import decide_pools
from autoscaler.rebalancing import surplus
from autoscaler.scaling_policy import PoolState
from autoscaler.snapshot import snapshot
from kvrelay.loadtest.report.timeline import Scaling
from kvrelay.planning.profile import Profile
from kvrelay.simulation.cluster import SimulatedCluster
from kvrelay.simulation.machine import Process
from kvrelay.simulation.scenario import Failure
from kvrelay.simulation.worker import SimulatedWorker
from kvrelay.types.workers import POOLS, PoolName, WorkerInfo

# A draining worker hands its sequences back after this time, in seconds.
DRAIN_GRACE_S = 30.0
# Interval between two looks at a draining worker, in seconds.
_LOOK_S = 0.1


class Controller:
    """Owns the sizes of the pools."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.decisions: list[Scaling] = []
        self._cluster = cluster
        self._policy = cluster.scenario.policy
        self._look_ahead = look_ahead(self._policy, cluster.config)
        self._states: dict[PoolName, PoolState] = {}
        # Workers that start or switch pools, by pool.
        self._starting: dict[PoolName, int] = dict.fromkeys(POOLS, 0)
        self._infos: tuple[WorkerInfo, ...] = ()
        for failure in cluster.scenario.failures:
            cluster.agenda.at(failure.at_s, lambda one=failure: self._kill(one))  # type: ignore[misc]

    @property
    def interval_s(self) -> float | None:
        """Seconds between two decisions; None without a policy."""
        return None if self._policy is None else self._policy.interval_s

    def _kill(self, failure: Failure) -> None:
        worker = self._cluster.workers.get(failure.worker_id)
        if worker is None:
            # The policy has stopped it.
            return
        self._cluster.remove(failure.worker_id, expected=False)
        if not worker.draining:
            self._start(worker.pool, worker.profile, worker.costs.start_s)

    def _start(self, pool: PoolName, profile: Profile, seconds: float) -> None:
        self._starting[pool] += 1
        process = Process(self._cluster.machine)

        def serve() -> None:
            process.ends()
            self._starting[pool] -= 1
            if self._size(pool) < self._cluster.desired[pool]:
                self._cluster.start(pool, profile)

        process.run(seconds, None, serve)

    def _members(self, pool: PoolName) -> list[SimulatedWorker]:
        workers = self._cluster.workers.values()
        return [one for one in workers if one.pool == pool and not one.draining]

    def _size(self, pool: PoolName) -> int:
        return len(self._members(pool))

    # Scaling

    def decide(self, infos: tuple[WorkerInfo, ...]) -> None:
        """Applies the policy to the workers' reports."""
        assert self._policy is not None, "there is a policy"
        cluster, now = self._cluster, self._cluster.agenda.now
        loads = [cluster.router.load()]
        desired = cluster.desired
        ahead = self._look_ahead
        foreseen = {} if ahead is None else ahead.foresee(infos, loads, now)
        seen = {
            pool: snapshot(pool, desired[pool], infos, loads, foreseen.get(pool)) for pool in POOLS
        }
        verdicts = decide_pools(seen, self._policy, self._states, now)
        self._states = {pool: state for pool, (_, state) in verdicts.items()}
        for pool, (verdict, _) in verdicts.items():
            before = desired[pool]
            if verdict.desired != before:
                scaling = Scaling(now, pool, before, verdict.desired, verdict.reason)
                self.decisions.append(scaling)
                desired[pool] = verdict.desired
        self._infos = infos
        self._apply()

    def _apply(self) -> None:
        """Starts and drains workers until the pools have their sizes."""
        spare = {pool: self._size(pool) - self._cluster.desired[pool] for pool in POOLS}
        for pool in POOLS:
            if spare[pool] > 0:
                self._shrink(pool, spare[pool])
        for pool in POOLS:
            missing = -spare[pool] - self._starting[pool]
            if missing <= 0:
                continue
            other: PoolName = "decode" if pool == "prefill" else "prefill"
            switching = 0
            if self._policy is not None and self._policy.rebalance:
                switching = max(0, min(missing, spare[other]))
            profile = self._cluster.scenario.pools[pool] or self._cluster.scenario.pools[other]
            for number in range(missing):
                costs = profile[0].costs
                self._start(
                    pool, profile[0], costs.role_change_s if number < switching else costs.start_s
                )

    def _shrink(self, pool: PoolName, count: int) -> None:
        names = [one.worker_id for one in self._members(pool)]
        infos = {one.worker_id: one for one in self._infos}
        for name in surplus(names, names, infos, count):
            worker = self._cluster.workers[name]
            worker.draining = True
            self._drain(worker, self._cluster.agenda.now + DRAIN_GRACE_S)

    def _drain(self, worker: SimulatedWorker, until_s: float) -> None:
        agenda = self._cluster.agenda
        if worker.worker_id not in self._cluster.workers:
            return
        if worker.empty:
            self._cluster.remove(worker.worker_id, expected=True)
            return
        if agenda.now >= until_s:
            worker.fail_all()
        agenda.after(_LOOK_S, lambda: self._drain(worker, until_s))
