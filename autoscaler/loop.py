"""The autoscaler loop: polls the registry at intervals and sets the wanted sizes of the pools. Only
the controller with the lease acts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from autoscaler.lease import Lease
from autoscaler.look_ahead import LookAhead
from autoscaler.polling import poll_regularly
from autoscaler.pool_sizes import Verdicts, decide_pools
from autoscaler.scaling_policy import Foreseen, PoolState
from autoscaler.snapshot import snapshot
from kvrelay.clock import Clock, MonotonicClock
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.errors import Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import Claim, RouterLoad, ScalingDecision
from kvrelay.types.workers import PoolName, WorkerInfo

log = get_logger("autoscaler")


class Autoscaler:
    """Owns the state of the scaling policy. After an operator's `set_desired` the policy continues
    from that size.
    """

    def __init__(
        self,
        registry: Registry,
        policy: AutoscalingPolicy,
        lease: Lease,
        clock: Clock | None = None,
        look_ahead: LookAhead | None = None,
    ) -> None:
        """`look_ahead` answers the metric slo; without it, slo is unknown."""
        self._registry = registry
        self._policy = policy
        self._lease = lease
        self._look_ahead = look_ahead
        # The last error of the look-ahead; empty if it worked.
        self._foresee_error = ""
        self._clock = clock or MonotonicClock()
        self._states: dict[PoolName, PoolState] = {}
        # Pools of which the registry has a delayed decision.
        self._delayed: set[PoolName] = set()

    async def run(self) -> None:
        """Polls until cancelled. While Redis does not answer, the sizes stay as they are."""
        await poll_regularly(self.tick, self._policy.interval_s, log)

    async def tick(self) -> None:
        """Polls once. Does nothing while this controller does not lead. Raises Unavailable."""
        try:
            await self._poll()
        except Unavailable:
            # The recommendations of the outage are unknown.
            self._states.clear()
            raise

    async def _poll(self) -> None:
        if not self._lease.leads:
            self._states.clear()
            return
        # Redis may have forgotten a later leader, and then the claim alone does not fence the
        # decision.
        async with self._lease.in_time():
            await self._decide(self._lease.claim())

    def _foresee(
        self, workers: Sequence[WorkerInfo], routers: Sequence[RouterLoad], now: float
    ) -> Mapping[PoolName, Foreseen]:
        """Returns the answers of the metric slo. An error in the figures of workers, routers and
        profile leaves them unknown: the other metrics go on.
        """
        if self._look_ahead is None:
            return {}
        try:
            found = self._look_ahead.foresee(workers, routers, now)
        except Exception as error:
            if repr(error) != self._foresee_error:
                log.exception("look_ahead_failed")
            self._foresee_error = repr(error)
            return {}
        self._foresee_error = ""
        return found

    async def _decide(self, claim: Claim) -> None:
        workers = await self._registry.workers()
        routers = await self._registry.routers()
        desired = await self._registry.desired()
        now = self._clock.now()
        foreseen = self._foresee(workers, routers, now)
        seen = {
            pool: snapshot(pool, size, workers, routers, foreseen.get(pool))
            for pool, size in desired.items()
        }
        verdicts = decide_pools(seen, self._policy, self._states, now)
        self._states = {pool: state for pool, (_, state) in verdicts.items()}
        changed = {
            pool: ScalingDecision(time.time(), pool, desired[pool], verdict.desired, verdict.reason)
            for pool, (verdict, _) in verdicts.items()
            if verdict.desired != desired[pool]
        }
        # Both sizes change in one write, so that the actuator sees that a worker can switch pools.
        sizes = {pool: (decision.before, decision.after) for pool, decision in changed.items()}
        if sizes and await self._registry.scale(sizes, claim):
            for pool, decision in changed.items():
                log.info(
                    "pool_scaled",
                    pool=pool,
                    before=decision.before,
                    after=decision.after,
                    reason=decision.reason,
                )
                await self._registry.record_decision(decision, claim)
        await self._tell_delays(desired, verdicts)

    async def _tell_delays(self, desired: Mapping[PoolName, int], verdicts: Verdicts) -> None:
        """Publishes, for status, what a delay of the policy holds back."""
        for pool, (verdict, _) in verdicts.items():
            if verdict.delayed is not None:
                held = ScalingDecision(
                    time.time(), pool, desired[pool], verdict.delayed, verdict.reason
                )
                await self._registry.publish_delayed(held, 3 * self._policy.interval_s)
                self._delayed.add(pool)
            elif pool in self._delayed:
                await self._registry.remove_delayed(pool)
                self._delayed.remove(pool)
