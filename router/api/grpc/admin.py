"""The operator's gRPC endpoint: kvrelay.v1.ClusterService, on a listener of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

import grpc

from kvrelay.config.section import MAX_POOL
from kvrelay.errors import InvalidArgument, KvRelayError, NotFound
from kvrelay.types.workers import POOLS, PoolName, Role
from kvrelay.wire import status
from kvrelay.wire.adapters import adapter_to_proto
from kvrelay.wire.cluster import ClusterServiceServicer, check_client, cluster_status_to_proto, pb
from router.frontend.adapter_operations import AdapterOperations
from router.observability.status import ClusterView
from router.runtime.driver import Driver
from router.runtime.worker_directory import RouterRegistry

ROLES: tuple[Role, ...] = (*POOLS, "standby")
# Shortest interval of WatchStatus.
LEAST_INTERVAL_S = 0.1


class ClusterService(ClusterServiceServicer):
    """Shows the last known cluster state and writes the operator's changes to the registry. Other
    processes act on these changes.
    """

    def __init__(
        self,
        driver: Driver,
        registry: RouterRegistry,
        view: ClusterView,
        adapters: AdapterOperations,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._view = view
        self._adapters = adapters

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClusterStatus:
        """Returns the cluster's status. Aborts if the client's protocol version is not
        supported.
        """
        try:
            check_client(request)
        except KvRelayError as error:
            await status.abort(context, error)
        return cluster_status_to_proto(await self._view.status())

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the cluster's status every `interval_seconds` (default 1) until the router
        drains.
        """
        interval = request.interval_seconds or 1.0
        if not math.isfinite(interval) or interval < LEAST_INTERVAL_S:
            await status.abort(
                context,
                InvalidArgument(
                    f"interval_seconds is {interval}; allowed is {LEAST_INTERVAL_S} or more",
                    field="interval_seconds",
                ),
            )
        while self._driver.state != "draining":
            await context.write(cluster_status_to_proto(await self._view.status()))
            await asyncio.sleep(interval)

    async def SetPoolSize(
        self, request: pb.SetPoolSizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetPoolSizeResponse:
        """Sets the wanted sizes of the named pools and returns the sizes of all pools. A decode
        pool has at least 1 worker.
        """
        try:
            sizes: dict[PoolName, int] = {
                pool: getattr(request, pool) for pool in POOLS if request.HasField(pool)
            }
            for pool, size in sizes.items():
                least = 1 if pool == "decode" else 0
                if not least <= size <= MAX_POOL:
                    raise InvalidArgument(
                        f"{pool} is {size}; allowed are {least} to {MAX_POOL} workers", field=pool
                    )
            await self._registry.set_desired(sizes)
            desired = await self._view.desired()
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.SetPoolSizeResponse(**desired)

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        """Requests the drain of one worker. Aborts with NOT_FOUND if the worker is unknown."""
        try:
            (worker_id,) = _named(await self._known(), [request.worker_id])
            await self._registry.request_drain(worker_id)
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.DrainWorkerResponse()

    async def RestartWorkers(
        self, request: pb.RestartWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.RestartWorkersResponse:
        """Requests restarts of the workers with the given names or roles, or of all workers without
        names. Aborts with NOT_FOUND if a worker is unknown.
        """
        try:
            roles = [name for name in request.names if name in ROLES] if request.names else ROLES
            known = await self._known()
            chosen = {worker_id for worker_id, role in known.items() if role in roles}
            chosen.update(_named(known, [name for name in request.names if name not in ROLES]))
            await self._registry.request_restart(chosen)
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.RestartWorkersResponse(worker_ids=sorted(chosen))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        """Lists the adapters of the configuration and those that operators have loaded."""
        try:
            found = await self._adapters.listed()
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.ListAdaptersResponse(adapters=map(adapter_to_proto, found))

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Loads an adapter on all workers. Aborts with the reason if one of them refuses it; then
        no worker has it.
        """
        try:
            found = await self._adapters.load(request.name, request.path)
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.LoadAdapterResponse(adapter=adapter_to_proto(found))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Stops serving an adapter. Aborts with NOT_FOUND if it is unknown."""
        try:
            await self._adapters.unload(request.name)
        except KvRelayError as error:
            await status.abort(context, error)
        return pb.UnloadAdapterResponse()

    async def _known(self) -> dict[str, Role]:
        """Returns the known workers' roles by worker name. Raises Unavailable."""
        standbys: dict[str, Role] = {
            one.worker_id: "standby" for one in await self._registry.standbys()
        }
        return standbys | {one.worker_id: one.pool for one in self._driver.known}


def _named(known: Mapping[str, Role], names: Sequence[str]) -> Sequence[str]:
    """Returns the names if all of them are known workers. Raises NotFound."""
    for name in names:
        if name not in known:
            raise NotFound(
                f"worker {name!r:.100} does not exist; the workers are "
                f"{', '.join(known) or 'none'}",
                field="worker_id",
            )
    return names
