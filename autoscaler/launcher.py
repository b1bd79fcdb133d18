"""The interface through which the actuator starts and ends worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvrelay.types.workers import PoolName, Role


class Launcher(Protocol):
    """Starts and ends worker processes."""

    async def start(self, role: Role, worker_id: str) -> None:
        """Requests a worker. The worker appears in the registry once it serves or stands by. Raises
        KvRelayError.
        """

    async def stop(self, worker_id: str) -> None:
        """Ends the worker now and drops its requests."""

    async def drain(self, worker_id: str) -> None:
        """Lets the worker finish within DRAIN_GRACE_S. Returns when the worker's process has
        ended.
        """

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        """Switches an empty or standby worker to the pool, under a new epoch and with its loaded
        weights.
        """

    async def ended(self) -> None:
        """Waits until a worker's process has ended since the last return."""

    def alive(self) -> Mapping[str, Role]:
        """Returns the workers whose process exists or was requested, with their roles."""

    def cause_of_death(self, worker_id: str) -> str:
        """Returns why the process of a worker has ended by itself, for people; "its process ended"
        if nothing more is known. Each death is told once.
        """

    def pending(self) -> Mapping[str, str]:
        """Returns the live workers that no node has room for, each with the missing resource."""
