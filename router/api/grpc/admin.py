"""The operator's gRPC endpoint: kvrelay.v1.ClusterService, on a listener of its own."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence

import grpc

from kvrelay.config.section import MAX_POOL
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.types.control_plane import ScalingDecision
from kvrelay.types.workers import POOLS, PoolName, Role
from kvrelay.wire.adapters import adapter_to_proto
from kvrelay.wire.cluster import ClusterServiceServicer, check_client, cluster_status_to_proto, pb
from router.api.grpc.auth import caller
from router.catalogue import Catalogue
from router.served_model import ServedModel

ROLES: tuple[Role, ...] = (*POOLS, "standby")
# Characters.
MAX_REASON = 200
# Shortest interval of WatchStatus.
LEAST_INTERVAL_S = 0.1


class ClusterService(ClusterServiceServicer):
    """Shows the last known cluster state and writes the operator's changes to the registry. Other
    processes act on these changes.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClusterStatus:
        """Returns the status of one model's pools, by default of the first. Raises
        FailedPrecondition if the client's protocol version is not supported, and NotFound for
        another model.
        """
        check_client(request)
        model = self._shown(request.model)
        return cluster_status_to_proto(await model.status())

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the status of one model's pools, by default of the first, every
        `interval_seconds` (default 1) until the router drains.
        """
        interval = request.interval_seconds or 1.0
        if not math.isfinite(interval) or interval < LEAST_INTERVAL_S:
            raise InvalidArgument(
                f"interval_seconds is {interval}; allowed is {LEAST_INTERVAL_S} or more",
                field="interval_seconds",
            )
        model = self._shown(request.model)
        while model.driver.state != "draining":
            await context.write(cluster_status_to_proto(await model.status()))
            await asyncio.sleep(interval)

    async def SetPoolSize(
        self, request: pb.SetPoolSizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetPoolSizeResponse:
        """Sets the wanted sizes of the named pools and returns the sizes of all pools. A decode
        pool has at least 1 worker, unless its policy lets it be empty. Changes of a size become
        entries of the scaling history.
        """
        sizes: dict[PoolName, int] = {
            pool: getattr(request, pool) for pool in POOLS if request.HasField(pool)
        }
        model = self._named(request.model)
        for pool, size in sizes.items():
            least = 1 if pool == "decode" and not model.driver.sleeps else 0
            if not least <= size <= MAX_POOL:
                raise InvalidArgument(
                    f"{pool} is {size}; allowed are {least} to {MAX_POOL} workers", field=pool
                )
        why = _why(request.reason)
        before = dict(await model.view.desired())
        changes = [
            ScalingDecision(time.time(), pool, before[pool], size, why)
            for pool, size in sizes.items()
            if size != before[pool]
        ]
        await model.registry.set_desired(sizes, changes)
        desired = await model.view.desired()
        return pb.SetPoolSizeResponse(**desired)

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        """Requests the drain of one worker. Raises NotFound if the worker is unknown."""
        known = {name: one for one in self._catalogue for name in await _workers(one)}
        (worker_id,) = _existing(known, [request.worker_id])
        await known[worker_id].registry.request_drain(worker_id)
        return pb.DrainWorkerResponse()

    async def RestartWorkers(
        self, request: pb.RestartWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.RestartWorkersResponse:
        """Requests restarts of the workers with the given names or roles, or of all workers without
        names. Raises NotFound if a worker is unknown.
        """
        roles = [name for name in request.names if name in ROLES] if request.names else ROLES
        model, known = await self._of_workers(request.model, request.names)
        chosen = {worker_id for worker_id, role in known.items() if role in roles}
        workers = [name for name in request.names if name not in ROLES]
        chosen.update(_existing(known, workers, f"; {', '.join(ROLES)} name all of a pool"))
        await model.registry.request_restart(chosen)
        return pb.RestartWorkersResponse(worker_ids=sorted(chosen))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        """Lists the adapters of the configuration and those that operators have loaded."""
        models = [self._named(request.model)] if request.model else list(self._catalogue)
        found = [adapter for one in models for adapter in await one.adapters.listed()]
        return pb.ListAdaptersResponse(adapters=map(adapter_to_proto, found))

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Loads an adapter on all workers. Raises the error of a worker that refuses it; then no
        worker has it.
        """
        found = await self._named(request.model).adapters.load(request.name, request.path)
        return pb.LoadAdapterResponse(adapter=adapter_to_proto(found))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Stops serving an adapter, of any model if the request names none. Raises NotFound if the
        adapter is unknown.
        """
        model = await self._of_adapter(request.model, request.name)
        await model.adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def _of_workers(
        self, name: str, workers: Sequence[str]
    ) -> tuple[ServedModel, dict[str, Role]]:
        """Returns the model with this name, or without a name the model that all of these workers
        serve, and its workers. Raises the errors of `_named`.
        """
        if not name and workers:
            for model in self._catalogue:
                if set(workers) <= (known := await _workers(model)).keys():
                    return model, known
        model = self._named(name)
        return model, await _workers(model)

    async def _of_adapter(self, name: str, adapter: str) -> ServedModel:
        """Returns the model with this name, or without a name the model whose adapter has the other
        name. Raises the errors of `_named`.
        """
        models = [self._named(name)] if name else list(self._catalogue)
        for model in models:
            if adapter in model.adapters.fixed_names or await model.adapters.lists(adapter):
                return model
        return models[0]

    def _named(self, name: str) -> ServedModel:
        """Returns the model with this name. Raises NotFound, and InvalidArgument for an empty name
        in a cluster of several models.
        """
        found = self._catalogue.find(name)
        if name and not found.serves(name):
            raise NotFound(
                f"model {name!r:.100} does not exist; this cluster serves {found.name!r}",
                field="model",
            )
        return found

    def _shown(self, name: str) -> ServedModel:
        return self._named(name) if name else next(iter(self._catalogue))


def _why(reason: str) -> str:
    """Returns the reason of an operator's change, for the scaling history. Raises InvalidArgument
    for a reason that is too long or is not printable.
    """
    if len(reason) > MAX_REASON or not reason.isprintable():
        raise InvalidArgument(
            f"reason has {len(reason)} characters; allowed are {MAX_REASON} printable ones, in one "
            "line",
            field="reason",
        )
    # Without tokens there is a single tenant, without a name.
    name = caller.get().name
    who = f"operator {name}" if name else "an operator"
    return f"set by {who}" + (f": {reason}" if reason else "")


async def _workers(model: ServedModel) -> dict[str, Role]:
    """Returns the known workers' roles by worker name. Raises Unavailable."""
    standbys: dict[str, Role] = {
        one.worker_id: "standby" for one in await model.registry.standbys()
    }
    return standbys | {one.worker_id: one.pool for one in model.driver.known}


def _existing(known: Collection[str], names: Sequence[str], others: str = "") -> Sequence[str]:
    """Returns the names if all of them are known workers. Raises NotFound, whose message ends with
    `others`: which names are allowed besides.
    """
    for name in names:
        if name not in known:
            raise NotFound(
                f"worker {name!r:.100} does not exist; the workers are "
                f"{', '.join(sorted(known)) or 'none'}{others}",
                field="worker_id",
            )
    return names
