"""The router's view of the cluster, for clients and operators."""

from __future__ import annotations

from pathlib import Path

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError
from kvrelay.protocol_version import ours
from kvrelay.state.registry_keys import RegistryKeys
from kvrelay.types.control_plane import ControllerInfo, RouterLoad, ScalingDecision
from kvrelay.types.workers import POOLS, PendingWorker, PoolName, StandbyWorker
from kvrelay.wire.cluster import ClusterStatus, PoolStatus, WorkerStatus
from router.observability.heartbeat import Heartbeat
from router.runtime.driver import Driver
from router.runtime.worker_directory import RouterRegistry

DECISIONS = 20


class ClusterView:
    """The last known state of the cluster. While the registry is unavailable, its part stays
    unchanged and the status names the problem.
    """

    def __init__(
        self,
        driver: Driver,
        registry: RouterRegistry,
        heartbeat: Heartbeat,
        model: str,
        config: ClusterConfig,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._heartbeat = heartbeat
        self.model = model
        # Names of all models of this router.
        self.models: tuple[str, ...] = (model,)
        # Begin of the names of the model's workers.
        self.worker_prefix = RegistryKeys(config.redis.namespace).worker_prefix
        self._config = config
        self._desired: dict[PoolName, int] = {
            "prefill": config.prefill.replicas,
            "decode": config.decode.replicas,
        }
        self._decisions: tuple[ScalingDecision, ...] = ()
        self._delayed: tuple[ScalingDecision, ...] = ()
        self._restarting: tuple[str, ...] = ()
        self._pending: tuple[PendingWorker, ...] = ()
        self._standbys: tuple[StandbyWorker, ...] = ()
        self._controllers: tuple[ControllerInfo, ...] = ()

    async def desired(self) -> dict[PoolName, int]:
        """Returns the wanted number of workers of each pool. Raises Unavailable."""
        self._desired |= await self._registry.desired()
        return self._desired

    async def status(self, load: RouterLoad) -> ClusterStatus:
        """Returns the cluster's status. Errors of the registry appear in its field `registry`.
        load: of this router.
        """
        state = (
            self._driver.registry_state
            if self._driver.registry_state != "ok"
            else self._heartbeat.trouble or "ok"
        )
        try:
            await self.desired()
            self._decisions = await self._registry.decisions(DECISIONS)
            self._delayed = await self._registry.delayed()
            self._restarting = tuple(sorted(await self._registry.restarts()))
            self._pending = await self._registry.pending()
            self._standbys = await self._registry.standbys()
            self._controllers = await self._registry.controllers()
        except KvRelayError as error:
            state = error.message
        known = self._driver.known
        serving = {one.worker_id for one in known}
        unfit = {
            one.worker_id: f"{one.cause}, {one.reason}" for one in self._driver.dispatcher.sick
        }
        unfit.update(self._driver.refused)
        return ClusterStatus(
            model=self.model,
            state=self._driver.state,
            pools=tuple(
                PoolStatus(
                    pool,
                    self._desired[pool],
                    tuple(
                        WorkerStatus.of(one, unfit.get(one.worker_id, ""))
                        for one in known
                        if one.pool == pool
                    ),
                )
                for pool in POOLS
            ),
            decisions=self._decisions,
            router=load,
            block_bytes=max((one.block_bytes for one in known), default=0),
            block_size=self._config.kv.block_size,
            registry=state,
            restarting=self._restarting,
            pending=self._pending,
            # The standby entry of a worker that has just joined a pool remains for a moment.
            standby=tuple(one for one in self._standbys if one.worker_id not in serving),
            controllers=self._controllers,
            protocol=ours(),
            routing=self._config.router.policy,
            autoscaling=Path(self._config.autoscaling or "").name,
            models=self.models,
            delayed=self._delayed,
        )
