"""The registry interface of a router: `kvrelay.state.registry.Registry`, or its in-memory twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

from kvrelay.types.control_plane import AdapterEntry, ControllerInfo, RouterLoad, ScalingDecision
from kvrelay.types.workers import PendingWorker, PoolName, StandbyWorker, WorkerInfo


class RouterRegistry(Protocol):
    """The registry operations of a router. Each call is bounded in time and may raise Unavailable;
    the router then continues with the last known state.
    """

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Returns the entries of all live workers."""
        ...

    async def pending(self) -> tuple[PendingWorker, ...]:
        """Returns the workers that no node has room for."""
        ...

    async def standbys(self) -> tuple[StandbyWorker, ...]:
        """Returns the standby workers."""
        ...

    async def controllers(self) -> tuple[ControllerInfo, ...]:
        """Returns the live controllers."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields after each change of the registry."""
        ...

    async def desired(self) -> dict[PoolName, int]:
        """Returns the wanted pool sizes, as far as they are set."""
        ...

    async def set_desired(
        self, sizes: Mapping[PoolName, int], decisions: Iterable[ScalingDecision] = ()
    ) -> None:
        """Sets the wanted sizes of the given pools, and adds the decisions that say so."""
        ...

    async def decisions(self, n: int) -> tuple[ScalingDecision, ...]:
        """Returns the last `n` scaling decisions, newest first."""
        ...

    async def delayed(self) -> tuple[ScalingDecision, ...]:
        """Returns the scaling decisions that a delay holds back, by pool."""
        ...

    async def request_drain(self, worker_id: str) -> None:
        """Requests the drain of a worker."""
        ...

    async def request_restart(self, worker_ids: Iterable[str]) -> None:
        """Requests the restart of workers."""
        ...

    async def restarts(self) -> frozenset[str]:
        """Returns the workers whose restart is requested."""
        ...

    async def adapters(self) -> tuple[AdapterEntry, ...]:
        """Returns the adapters that operators have loaded."""
        ...

    async def put_adapter(self, entry: AdapterEntry) -> bool:
        """Lists an adapter that is not served yet, or marks a listed one as served. Returns whether
        it did: the name may have other files, or may have been removed before it was served.
        """
        ...

    async def withdraw_adapter(self, entry: AdapterEntry) -> None:
        """Removes an adapter whose load has failed, unless it is served or has other files."""
        ...

    async def remove_adapter(self, name: str) -> None:
        """Removes an adapter."""
        ...

    async def publish_router(self, load: RouterLoad) -> None:
        """Publishes this router's entry, which expires without further calls."""
        ...

    async def remove_router(self, router_id: str) -> None:
        """Removes the router's entry."""
        ...
