"""The control of one model's pools: its lease, its workers and its autoscaler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from autoscaler.look_ahead import look_ahead
from autoscaler.loop import Autoscaler
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_policy
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.launch.failed_start import FailedStarts
from kvrelay.launch.launcher import RayLauncher
from kvrelay.launch.ray.cluster import RayCluster
from kvrelay.models import resolve_model
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.state.registry import Registry
from kvrelay.types.workers import POOLS, PoolName
from kvrelay.worker.runtime.settings import WorkerSettings

# Workers of a pool without a policy that a local Ray has room for after `kvrelay scale`: one for
# each core, and on small machines as many as a trial of scaling needs.
_BY_HAND = max(4, os.cpu_count() or 1)
# Until the workers of a model that failed start again; doubles up to the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 300.0

log = get_logger("controller")


class ModelPools:
    """The pools of one model, as the configuration wants them."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises ConfigError for a policy file that cannot be read."""
        self.config = config
        self.policy: AutoscalingPolicy | None = (
            None if config.autoscaling is None else load_policy(Path(config.autoscaling))
        )
        self.sizes: dict[PoolName, int] = {pool: config.pool(pool).replicas for pool in POOLS}

    @property
    def standby(self) -> int:
        """Workers to keep outside the pools."""
        return 0 if self.policy is None else self.policy.standby

    @property
    def most(self) -> dict[PoolName, int]:
        """The most workers that each pool may have by its policy or by `kvrelay scale`, plus one
        replacement.
        """
        largest: dict[PoolName, int] = {}
        for pool, size in self.sizes.items():
            bounds = self.policy.pool(pool) if self.policy is not None else None
            largest[pool] = max(size, _BY_HAND if bounds is None else bounds.max_replicas) + 1
        return largest


class ModelController:
    """Starts, watches and scales the workers of one model while its controller leads."""

    def __init__(
        self,
        pools: ModelPools,
        registry: Registry,
        cluster: RayCluster,
        owner: str,
        *,
        sole: bool,
        template: str,
    ) -> None:
        """`owner` names this process in the lease. `template` is the socket of the template
        process, or empty.
        """
        config = pools.config
        settings = WorkerSettings(
            "", "decode", config.model.path, config.redis.url, config, pin=cluster.is_local
        )
        self._pools = pools
        self._registry = registry
        self._cluster = cluster
        self._lease = Lease(registry, owner, sole=sole)
        self._launcher = RayLauncher(settings, cluster, self._lease, template)
        policy = pools.policy
        self._actuator = Actuator(
            registry,
            self._launcher,
            pools.sizes,
            lease=self._lease,
            credentials=Credentials.internal(config.security, "router"),
            rebalance=policy is not None and policy.rebalance,
            standby=pools.standby,
        )

    @property
    def has_served(self) -> bool:
        """Whether a worker has served, or none was to start with the cluster."""
        return self._actuator.has_served or not any(self._pools.sizes.values())

    async def begin(self) -> None:
        """Takes the lease if it is free; otherwise `run` tries again."""
        with suppress(Unavailable):
            await self._lease.renew()

    async def run(self) -> None:
        """Runs until cancelled. Raises the error that prevents workers from starting, for example
        ModelRefused.
        """
        # Each worker resolves the model on its own host again.
        resolve_model(self._pools.config.model.path)
        tasks = [asyncio.create_task(one) for one in self._runs()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run_contained(self, is_fatal: Callable[[], bool]) -> None:
        """Runs until cancelled. An error stops the workers of this model, which start again after a
        pause. Raises the error if `is_fatal`.
        """
        pause_s = _PAUSE_S
        while True:
            try:
                await self.run()
            except KvRelayError as error:
                if is_fatal():
                    raise
                log.error(
                    "model_stopped",
                    model=self._pools.config.model.name,
                    reason=error.message,
                    again_in_s=pause_s,
                )
            await self.stop_all()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _runs(self) -> list[Coroutine[None, None, None]]:
        runs = [
            self._lease.run(),
            self._actuator.run(),
            self._launcher.look_for_room(),
            refused_by_all(self._launcher, self._registry),
        ]
        # On several nodes, another node may succeed where one failed.
        if self._cluster.is_local:
            runs.append(never_served(self._launcher, self._actuator))
        policy = self._pools.policy
        if policy is not None:
            ahead = look_ahead(policy, self._pools.config)
            runs.append(Autoscaler(self._registry, policy, self._lease, look_ahead=ahead).run())
        return runs

    async def leave(self) -> None:
        """Ends all own workers. Serving workers drain first."""
        await self._actuator.leave()

    async def stop_all(self) -> None:
        """Stops all workers now."""
        await self._launcher.stop_all()


async def refused_by_all(launcher: RayLauncher, registry: Registry) -> None:
    """Raises the error of a worker that cannot serve, unless other workers serve in its role. In
    that case the cause is the worker's host, and the log has the error.
    """
    while True:
        refused = await launcher.refused()
        try:
            infos = await registry.workers()
        # Without Redis, it is unknown which workers serve. The actuator retries later.
        except Unavailable:
            continue
        if refused.concerns_all(infos):
            raise refused.error


async def never_served(launcher: RayLauncher, actuator: Actuator) -> None:
    """Raises an error if no worker has served yet and the failure is permanent, or several starts
    have failed.
    """
    starts = FailedStarts()
    while True:
        failed = await launcher.failed()
        error = None if actuator.has_served else starts.verdict(failed)
        if error is not None:
            raise error
