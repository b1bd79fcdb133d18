"""The operator's gRPC door: kvrelay.v1.ClusterService, on a listener of its own."""

from __future__ import annotations

import asyncio
import math

import grpc

from kvrelay.config import ClusterConfig
from kvrelay.errors import InvalidArgument, KvRelayError, NotFound
from kvrelay.types import POOLS, PoolName, ScalingDecision
from kvrelay.wire import status
from kvrelay.wire.cluster import (
    ClusterServiceServicer,
    ClusterStatus,
    PoolStatus,
    WorkerStatus,
    cluster_status_to_proto,
    pb,
)
from router.driver import Driver
from router.heartbeat import Heartbeat
from router.registry import RouterRegistry

MAX_POOL = 1024  # workers that an operator may ask for
LEAST_INTERVAL_S = 0.1  # of WatchStatus
DECISIONS = 20


class ClusterService(ClusterServiceServicer):
    """Shows the last that is known; what the operator changes is written to the registry, and others act on it."""

    def __init__(
        self, driver: Driver, registry: RouterRegistry, heartbeat: Heartbeat, model: str, config: ClusterConfig
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._heartbeat = heartbeat
        self._model = model
        self._config = config
        self._desired: dict[PoolName, int] = {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
        self._decisions: tuple[ScalingDecision, ...] = ()

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.ClusterStatus:
        return cluster_status_to_proto(await self._status())

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext) -> None:
        interval = request.interval_seconds or 1.0
        if not math.isfinite(interval) or interval < LEAST_INTERVAL_S:
            await status.abort(
                context,
                InvalidArgument(
                    f"interval_seconds is {interval}; allowed is {LEAST_INTERVAL_S} or more", field="interval_seconds"
                ),
            )
        while self._driver.state != "draining":
            await context.write(cluster_status_to_proto(await self._status()))
            await asyncio.sleep(interval)

    async def SetPoolSize(
        self, request: pb.SetPoolSizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetPoolSizeResponse:
        try:
            sizes: dict[PoolName, int] = {pool: getattr(request, pool) for pool in POOLS if request.HasField(pool)}
            for pool, size in sizes.items():
                least = 1 if pool == "decode" else 0
                if not least <= size <= MAX_POOL:
                    raise InvalidArgument(f"{pool} is {size}; allowed is {least} to {MAX_POOL}", field=pool)
            await self._registry.set_desired(sizes)
            self._desired |= await self._registry.desired()
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.SetPoolSizeResponse(**self._desired)

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        try:
            known = [one.worker_id for one in self._driver.known]
            if request.worker_id not in known:
                raise NotFound(
                    f"worker {request.worker_id!r:.100} is not known; there are: {', '.join(known) or 'none'}",
                    field="worker_id",
                )
            await self._registry.request_drain(request.worker_id)
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.DrainWorkerResponse()

    async def _status(self) -> ClusterStatus:
        """A registry that is away leaves its part as it was last seen, and is named in the status."""
        state = self._driver.registry_state
        try:
            self._desired |= await self._registry.desired()
            self._decisions = await self._registry.decisions(DECISIONS)
        except KvRelayError as error:
            state = error.message
        known = self._driver.known
        return ClusterStatus(
            model=self._model,
            state=self._driver.state,
            pools=tuple(
                PoolStatus(pool, self._desired[pool], tuple(WorkerStatus.of(one) for one in known if one.pool == pool))
                for pool in POOLS
            ),
            decisions=self._decisions,
            router=self._heartbeat.load(),
            block_bytes=max((one.block_bytes for one in known), default=0),
            block_size=self._config.kv.block_size,
            registry=state,
        )
