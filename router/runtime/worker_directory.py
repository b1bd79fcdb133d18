"""The cluster's registry, as a router needs it: `kvrelay.state.registry.Registry`, or a twin in
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

from kvrelay.types import (
    ControllerInfo,
    PendingWorker,
    PoolName,
    RouterLoad,
    ScalingDecision,
    StandbyWorker,
    WorkerInfo,
)


class RouterRegistry(Protocol):
    """Each call is bounded in time and may raise Unavailable; a router goes on from what it heard
    last.
    """

    async def workers(self) -> tuple[WorkerInfo, ...]: ...

    async def pending(self) -> tuple[PendingWorker, ...]: ...

    async def standbys(self) -> tuple[StandbyWorker, ...]: ...

    async def controllers(self) -> tuple[ControllerInfo, ...]: ...

    def changes(self) -> AsyncIterator[None]: ...

    async def desired(self) -> dict[PoolName, int]: ...

    async def set_desired(self, sizes: Mapping[PoolName, int]) -> None: ...

    async def decisions(self, n: int) -> tuple[ScalingDecision, ...]: ...

    async def request_drain(self, worker_id: str) -> None: ...

    async def request_restart(self, worker_ids: Iterable[str]) -> None: ...

    async def restarts(self) -> frozenset[str]: ...

    async def publish_router(self, load: RouterLoad) -> None: ...

    async def remove_router(self, router_id: str) -> None: ...
