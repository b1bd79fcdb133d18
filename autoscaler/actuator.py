"""Brings each pool to its wanted size: starts, drains, stops, replaces and restarts workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping

from autoscaler.launcher import Launcher
from autoscaler.lease import Lease
from autoscaler.managed_workers import ManagedWorkers
from autoscaler.polling import poll_regularly
from autoscaler.rebalancing import (
    number_of,
    standbys_to_join,
    surplus,
    workers_to_switch,
)
from autoscaler.starved_pool import ROOM_S, starved_pool
from autoscaler.worker_drain import WorkerDrain
from autoscaler.worker_watch import WorkerWatch
from kvrelay.clock import Clock, MonotonicClock
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.state.registry import Registry
from kvrelay.types.workers import POOLS, PendingWorker, PoolName, WorkerInfo

# Most workers of a pool to start in one poll. A start takes tens of milliseconds, and a size beyond
# the room of the machines must not keep the controller from reading the next one.
_STARTS_PER_POLL = 16

log = get_logger("actuator")


class Actuator:
    """Owns the workers that it started. As leader it also decides about other controllers'
    workers.
    """

    def __init__(
        self,
        registry: Registry,
        launcher: Launcher,
        initial: Mapping[PoolName, int],
        *,
        lease: Lease | None = None,
        clock: Clock | None = None,
        credentials: Credentials | None = None,
        rebalance: bool = False,
        standby: int = 0,
        drain_timeout_s: float = DRAIN_GRACE_S,
        interval_s: float = 0.5,
    ) -> None:
        """Creates the actuator; `run` starts the work.

        - initial: pool sizes. They hold until the registry has sizes, and again if the registry
          loses them.
        - lease: None means that no other actuator uses the registry, as in tests.
        - rebalance: a worker switches pools if one pool would stop a worker and the other would
          start one.
        - standby: number of workers to keep outside the pools. A standby worker joins a pool that
          lacks one.
        """
        clock = clock or MonotonicClock()
        self._registry = registry
        self._launcher = launcher
        self._lease = lease
        self._sizes = dict(initial)
        self._credentials = credentials
        self._rebalance = rebalance
        self._standby = standby
        self._interval_s = interval_s
        # Workers that the registry lists as pending.
        self._told_pending: set[str] = set()
        self._clock = clock
        # Time at which another worker may have to leave its place for the other pool.
        self._next_room_at = 0.0
        self._workers = ManagedWorkers(registry, launcher, lease, clock, interval_s)
        self._watch = WorkerWatch(self._workers, interval_s)
        self._drain = WorkerDrain(self._workers, clock, credentials, drain_timeout_s)

    @property
    def has_served(self) -> bool:
        """Whether any worker has been ready. The workers' configuration is then known to work."""
        return self._watch.has_served

    async def run(self) -> None:
        """Polls until cancelled. While Redis does not answer, the workers stay as they are."""
        await poll_regularly(self.tick, self._interval_s, log, self._launcher.ended)

    async def leave(self) -> None:
        """Ends all own workers. Serving workers drain first; the others stop at once. Raises the
        first error once every worker has ended or failed to.
        """
        await _all_done(
            self._launcher.drain(worker_id) if worker.serving else self._launcher.stop(worker_id)
            for worker_id, worker in self._workers.own().items()
        )

    async def tick(self) -> None:
        """Polls once and acts on the result. Raises Unavailable."""
        if self._credentials is not None:
            # The call logs problems with the credentials.
            self._credentials.trouble()
        # A registry that loses writes also loses heartbeats, so a missing heartbeat would mean
        # nothing.
        await self._registry.check_writable()
        if self._lease is not None and not self._lease.leads:
            await self._follow(succeeded=self._lease.succeeded)
            return
        infos = await self._workers.infos()
        sizes = await self._wanted_sizes()
        drains, restarts = await self._registry.drains(), await self._registry.restarts()
        if self._lease is not None and self._lease.adopts:
            self._watch.adopt(infos, self._lease.owner)
        standbys = await self._registry.standbys() if self._standby else ()
        await self._workers.remove_dead(infos)
        pending = self._launcher.pending()
        await self._watch.note_states(infos, {one.worker_id: one for one in standbys}, pending)
        await self._publish_pending()
        await self._note_requests(drains, restarts, infos)
        if self._rebalance:
            self._switch_pools("prefill", "decode", infos)
            self._switch_pools("decode", "prefill", infos)
        starved = await self._make_room(infos)
        # A decode worker can serve every request, so the decode pool gets the last standby worker.
        for pool in sorted(sizes, key=POOLS.index, reverse=self._standby > 0):
            leaving = self._workers.next_restart(pool, restarts)
            may_grow = starved is None or starved == pool
            await self._resize(pool, sizes[pool], infos, leaving, may_grow)
        if self._standby:
            await self._keep_standbys(restarts)
        await _all_done(
            self._drain.carry_on(worker_id, worker, infos)
            for worker_id, worker in list(self._workers.by_id.items())
            if worker.draining_since is not None
        )

    async def _follow(self, *, succeeded: bool) -> None:
        """Acts on this process's own workers while another controller leads or none does.

        The leader drains workers; each controller ends its own empty workers. A new leader does not
        count workers that have not served yet. If another controller has the lease, this method
        stops those workers too.
        """
        infos = await self._workers.infos()
        self._workers.by_id = self._workers.own()
        await self._workers.remove_dead(infos)
        for worker_id, worker in list(self._workers.by_id.items()):
            info = infos.get(worker_id)
            if info is None:
                if succeeded and not worker.serving:
                    log.info("worker_start_cancelled", worker=worker_id)
                    await self._workers.stop(worker_id, info)
                continue
            worker.serving = True
            if info.state == "draining":
                await self._drain.stop_if_drained(worker_id, info)
            else:
                # The leader decides again.
                worker.draining_since = worker.turns_to = None

    async def _wanted_sizes(self) -> dict[PoolName, int]:
        known = await self._registry.desired()
        lost = {pool: size for pool, size in self._sizes.items() if pool not in known}
        if self._lease is None:
            await self._registry.set_desired(lost)
        else:
            await self._registry.restore_desired(lost, self._lease.claim())
        self._sizes |= known
        return self._sizes

    async def _publish_pending(self) -> None:
        pending = self._launcher.pending()
        for worker_id, reason in pending.items():
            role = self._workers.by_id[worker_id].pool
            await self._registry.publish_pending(PendingWorker(worker_id, role, reason))
        # An entry that expires by itself would show operators a worker that is no longer wanted.
        for worker_id in self._told_pending - pending.keys():
            await self._registry.remove_pending(worker_id)
        self._told_pending = set(pending)

    async def _note_requests(
        self, drains: Collection[str], restarts: Collection[str], infos: Mapping[str, WorkerInfo]
    ) -> None:
        """Drains the workers that operators asked to drain. Removes requests for workers that are
        gone.
        """
        for worker_id in {*drains, *restarts}:
            if worker_id not in self._workers.by_id:
                if worker_id not in infos:
                    await self._registry.clear_requests(worker_id)
            elif worker_id in drains:
                self._workers.mark_draining(worker_id, "an operator asked for it")

    def _switch_pools(
        self, giver: PoolName, taker: PoolName, infos: Mapping[str, WorkerInfo]
    ) -> None:
        of_giver, of_taker = (
            self._workers.of_pool(pool, self._sizes.get(pool, 0)) for pool in (giver, taker)
        )
        for worker_id in workers_to_switch(of_giver, of_taker, infos):
            reason = f"the {taker} pool has more use for it"
            self._workers.mark_draining(worker_id, reason, turns_to=taker)

    async def _make_room(self, infos: Mapping[str, WorkerInfo]) -> PoolName | None:
        """Makes room for a pool whose workers all wait for room: the workers of the other pool that
        wait give way, and one that has a place leaves it. Returns the pool, which alone may grow.

        A worker that dies or is drained would otherwise lose its place for good to a worker that
        waited.
        """
        pools = {pool: self._workers.of_pool(pool, size) for pool, size in self._sizes.items()}
        found = starved_pool(pools)
        # A standby worker with a place joins the pool at once.
        if found is None or set(self._workers.standbys()) - self._launcher.pending().keys():
            return None
        starved, giver = found
        reason = f"the {starved} pool has no worker, and no node has room for one"
        for worker_id in pools[giver].pending:
            log.info("worker_gives_way", worker=worker_id, reason=reason)
            await self._workers.stop(worker_id, None, reason)
        now = self._clock.now()
        is_leaving = any(one.draining_since is not None for one in self._workers.by_id.values())
        if not is_leaving and now >= self._next_room_at:
            self._next_room_at = now + ROOM_S
            workers = pools[giver]
            (leaving,) = surplus(workers.placed, workers.serving, infos, 1)
            self._workers.mark_draining(leaving, reason)
        return starved

    async def _resize(
        self,
        pool: PoolName,
        size: int,
        infos: Mapping[str, WorkerInfo],
        leaving: str | None,
        may_grow: bool,
    ) -> None:
        """Brings the pool to `size` workers, or to `size` + 1 while `leaving` waits for its
        successor to be ready. Starts at most `_STARTS_PER_POLL` workers, and none unless it
        `may_grow`.
        """
        workers = self._workers.of_pool(pool, size)
        staying = list(workers.staying)
        here = [one for one in staying if self._workers.by_id[one].turns_to is None]
        ready = [one for one in here if one in infos and infos[one].state == "ready"]
        if leaving is not None and len(ready) > size:
            reason = "an operator asked for its restart, and its successor serves"
            self._workers.mark_draining(leaving, reason)
            staying.remove(leaving)
            leaving = None
        missing = size + (leaving is not None) - len(staying)
        missing -= await self._join(pool, missing + len(workers.pending))
        if leaving is not None and missing > 0 and len(self._workers.standbys()) < self._standby:
            # A restart can wait for the next standby worker. Its start costs the same.
            missing -= 1
        if missing > 0 and may_grow and self._workers.may_start(pool):
            for _ in range(min(missing, _STARTS_PER_POLL)):
                await self._workers.start(pool)
        for worker_id in surplus(staying, workers.serving, infos, -missing):
            self._workers.mark_draining(worker_id, f"the pool is wanted at {size}")

    async def _join(self, pool: PoolName, count: int) -> int:
        """Moves up to `count` standby workers into the pool and returns the number of moved
        workers.

        The pool's crash loop backoff does not apply, because a join costs no start. A standby
        worker that is still loading is ready sooner than a new worker.
        """
        standbys = self._workers.standbys()
        loaded = [one for one in standbys if self._workers.by_id[one].ready_polls]
        placed = [one for one in standbys if one not in self._launcher.pending()]
        chosen = standbys_to_join(placed, loaded, max(0, count))
        for worker_id in chosen:
            log.info("standby_joins", worker=worker_id, pool=pool, ready=worker_id in loaded)
            await self._workers.join(worker_id, pool)
        return len(chosen)

    async def _keep_standbys(self, restarts: Collection[str]) -> None:
        """Starts missing standby workers once the pools are complete.

        A start takes the cores that a joining worker needs, so standby workers start last. A pool
        in a crash loop uses up standby workers, so the pools' backoff also delays the start of
        standby workers.
        """
        workers, standbys = self._workers.by_id, self._workers.standbys()
        if leaving := [one for one in standbys if one in restarts]:
            if all(workers[one].ready_polls for one in standbys):
                oldest = min(leaving, key=number_of)
                self._workers.mark_draining(oldest, "an operator asked for its restart")
            return
        pools_complete = all(one.serving for one in workers.values() if one.pool != "standby")
        if pools_complete and self._workers.may_start():
            for _ in range(self._standby - len(standbys)):
                await self._workers.start("standby")


async def _all_done(actions: Iterable[Awaitable[None]]) -> None:
    """Waits for all actions, also after a failure. Then raises the first error."""
    for result in await asyncio.gather(*actions, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
