"""The workers that a controller counts, and the actions on their processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from autoscaler.backoff import Deaths
from autoscaler.launcher import Launcher
from autoscaler.lease import Lease
from autoscaler.rebalancing import PoolWorkers, number_of
from kvrelay.clock import Clock
from kvrelay.errors import KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.state.registry import Registry
from kvrelay.types.workers import POOLS, EndedWorker, PoolName, Role, WorkerInfo

# A worker that dies after serving this long does not count towards the crash loop backoff.
SETTLED_S = 5.0

log = get_logger("actuator")


@dataclass(slots=True)
class ManagedWorker:
    """A controller's record of one worker."""

    pool: Role
    # The worker has been ready in a pool.
    serving: bool = False
    # Number of polls since the worker was last seen.
    silent_polls: int = 0
    # Number of polls in which the worker could take requests or join a pool.
    ready_polls: int = 0
    draining_since: float | None = None
    drain_sent: bool = False
    # Grace that the drain call gave the worker, in seconds.
    grace_s: float | None = None
    # Pool that the worker joins once it is empty.
    turns_to: PoolName | None = None
    # Epoch of the worker's last role. The entry of that epoch may still be in the registry.
    past_epoch: int = 0
    # Another controller owns the process, and ends it after the drain.
    foreign: bool = False
    # Why the worker drains.
    drain_reason: str = ""


class ManagedWorkers:
    """Owns the records of the workers and the crash loop backoff of each role."""

    def __init__(
        self,
        registry: Registry,
        launcher: Launcher,
        lease: Lease | None,
        clock: Clock,
        interval_s: float,
    ) -> None:
        """`interval_s` is the time between two polls. Without a lease, no other controller uses the
        registry.
        """
        self.by_id: dict[str, ManagedWorker] = {}
        self._registry = registry
        self._launcher = launcher
        self._lease = lease
        self._clock = clock
        self._interval_s = interval_s
        self._deaths: dict[Role, Deaths] = {role: Deaths() for role in (*POOLS, "standby")}
        # Next number of a worker name for each role. It is above all assigned numbers.
        self._next_number: dict[Role, int] = dict.fromkeys(self._deaths, 0)

    async def infos(self) -> dict[str, WorkerInfo]:
        """Returns the workers' registry entries, without those of past roles. Raises
        Unavailable.
        """
        entries = {info.worker_id: info for info in await self._registry.workers()}
        return {
            worker_id: info
            for worker_id, info in entries.items()
            if worker_id not in self.by_id or info.epoch > self.by_id[worker_id].past_epoch
        }

    def own(self) -> dict[str, ManagedWorker]:
        """Returns the workers whose processes this controller owns."""
        return {one: worker for one, worker in self.by_id.items() if not worker.foreign}

    def standbys(self) -> list[str]:
        """Returns the standby workers that can join a pool now, or once they are loaded."""
        return [
            one
            for one, worker in self.by_id.items()
            if worker.pool == "standby" and worker.draining_since is None
        ]

    def of_pool(self, pool: PoolName, size: int) -> PoolWorkers:
        """Returns the workers that stay in the pool or switch to it, with its wanted size."""
        staying = {
            one: worker
            for one, worker in self.by_id.items()
            if worker.turns_to == pool or (worker.pool == pool and worker.draining_since is None)
        }
        # Other controllers' workers are not in `serving`, so they are drained first. They cannot
        # switch pools, because this process does not own their processes.
        serving = [one for one, worker in staying.items() if worker.serving and not worker.foreign]
        pending = [one for one in self._launcher.pending() if one in staying]
        return PoolWorkers(size, list(staying), serving, pending)

    def next_restart(self, pool: PoolName, requested: Collection[str]) -> str | None:
        """Returns the pool's worker to restart next. Workers restart one at a time, the oldest
        first.
        """
        of_pool = [one for one in requested if one in self.by_id and self.by_id[one].pool == pool]
        if any(self.by_id[one].draining_since is not None for one in of_pool):
            return None
        # Standby workers restart first; otherwise an outdated standby worker could be the
        # successor.
        if any(one in requested for one in self.standbys()):
            return None
        return min(of_pool, key=number_of, default=None)

    def may_start(self, *roles: Role) -> bool:
        """Whether the backoff of each role allows a start. Without roles: of all roles."""
        now = self._clock.now()
        return all(now >= self._deaths[role].replace_at for role in roles or self._deaths)

    def note_death(self, worker: ManagedWorker) -> None:
        """Records the death for the backoff. The death of a worker that served for SETTLED_S does
        not delay its replacement.
        """
        if worker.ready_polls * self._interval_s < SETTLED_S:
            self._slow_down(worker.pool)

    def _slow_down(self, role: Role) -> None:
        now = self._clock.now()
        deaths = self._deaths[role] = self._deaths[role].and_at(now)
        if (delay := deaths.replace_at - now) > 0:
            log.warning("pool_crash_loop", pool=role, deaths=len(deaths.times), wait_s=delay)

    def mark_draining(self, worker_id: str, reason: str, turns_to: PoolName | None = None) -> None:
        """Marks the worker as draining. The last given `turns_to` replaces earlier values."""
        worker = self.by_id[worker_id]
        worker.turns_to = turns_to
        if worker.draining_since is None:
            worker.draining_since = self._clock.now()
            worker.drain_reason = reason
            log.info("worker_draining", worker=worker_id, reason=reason, turns_to=turns_to)

    def in_time(self) -> AbstractAsyncContextManager[None]:
        """Returns a context for actions that must not happen once another controller leads. Raises
        Unavailable if the lease ends.
        """
        return nullcontext() if self._lease is None else self._lease.in_time()

    async def start(self, role: Role) -> None:
        """Starts a worker. A failure counts as a death of the role."""
        worker_id = await self._next_name(role)
        self._next_number[role] = number_of(worker_id) + 1
        log.info("worker_starting", worker=worker_id)
        try:
            async with self.in_time():
                await self._launcher.start(role, worker_id)
        except KvRelayError as error:
            if self._lease is not None and not self._lease.leads:
                raise
            log.error("worker_start_failed", worker=worker_id, reason=error.message)
            self._slow_down(role)
        else:
            self.by_id[worker_id] = ManagedWorker(role)

    async def _next_name(self, role: Role) -> str:
        if self._lease is not None and self._lease.name_tag:
            stem = f"{role}-{self._lease.name_tag}"
            return self._registry.worker_name(stem, self._next_number[role])
        return await self._registry.next_name(role, self._next_number[role])

    async def join(self, worker_id: str, pool: PoolName) -> None:
        """Moves a standby worker into the pool. The time limit of its start continues."""
        async with self.in_time():
            await self._launcher.turn(worker_id, pool)
        silent_polls = self.by_id[worker_id].silent_polls
        self.by_id[worker_id] = ManagedWorker(pool, silent_polls=silent_polls)
        await self._registry.remove_standby(worker_id)

    async def switch(self, worker_id: str, pool: PoolName, info: WorkerInfo) -> None:
        """Switches an empty worker to the pool. `info` is the entry of its last role."""
        log.info("worker_switches_pool", worker=worker_id, pool=pool)
        self.by_id[worker_id] = ManagedWorker(pool, past_epoch=info.epoch)
        await self._launcher.turn(worker_id, pool)
        await self._registry.remove_worker(worker_id, info.epoch)

    async def stop(
        self, worker_id: str, info: WorkerInfo | None, reason: str = "the controller stopped it"
    ) -> None:
        """Ends the worker's process now. `reason`: of a worker that does not drain."""
        worker = self.by_id.pop(worker_id)
        await self._launcher.stop(worker_id)
        await self._forget(worker_id, worker, info, reason)

    async def remove_dead(self, infos: Mapping[str, WorkerInfo]) -> None:
        """Removes own workers whose process has ended."""
        alive = self._launcher.alive()
        for worker_id in [one for one in self.own() if one not in alive]:
            worker = self.by_id.pop(worker_id)
            if worker.draining_since is None:
                self.note_death(worker)
            cause = self._launcher.cause_of_death(worker_id)
            log.warning("worker_exited", worker=worker_id, reason=cause)
            await self._forget(worker_id, worker, infos.get(worker_id), cause)

    async def _forget(
        self, worker_id: str, worker: ManagedWorker, info: WorkerInfo | None, reason: str
    ) -> None:
        """Removes the worker's entry, so that routers need not wait for its expiry, and publishes
        why it ended.
        """
        ended = EndedWorker(worker_id, worker.drain_reason or reason, bool(worker.drain_reason))
        await self._registry.publish_ended(ended)
        if info is not None:
            await self._registry.remove_worker(worker_id, info.epoch)
        await self._registry.clear_requests(worker_id)
        if worker.pool == "standby":
            await self._registry.remove_standby(worker_id)
