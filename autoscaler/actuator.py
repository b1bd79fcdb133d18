"""Makes the pools as large as they are wanted: starts, drains, stops, replaces and restarts
workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import grpc

from autoscaler.backoff import Deaths
from autoscaler.lease import Lease
from autoscaler.polling import poll_regularly
from autoscaler.rebalancing import Members, changing_over, joiners, number_of, surplus
from kvrelay.clock import Clock, MonotonicClock
from kvrelay.errors import KvRelayError
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.state.registry import Registry
from kvrelay.types import POOLS, PendingWorker, PoolName, Role, StandbyWorker, WorkerInfo
from kvrelay.wire import status
from kvrelay.wire.worker import WorkerServiceStub, pb

SILENT_S = 30.0  # a worker that sends no heartbeat for so long is stopped and replaced
START_S = 600.0  # as is one that is not ready so long after its start
# A worker that dies after having served for so long is not one of those that keep dying
SETTLED_S = 5.0
GONE_S = 5.0  # another controller's worker whose entry is missing for so long is gone
# The last worker of a version of the model may take as long as an answer: it cannot go on at a
# worker of another one.
VERSION_DRAIN_S = 600.0
LATE_S = 30.0  # a worker that should have handed back what it held so long ago is not waited for
_DRAIN_CALL_S = 5.0

log = get_logger("actuator")


class Launcher(Protocol):
    """Where worker processes come from."""

    async def start(self, role: Role, worker_id: str) -> None:
        """Asks for a worker; it appears in the registry once it serves or stands by. Raises
        KvRelayError.
        """

    async def stop(self, worker_id: str) -> None:
        """Ends the worker now, whatever it holds."""

    async def drain(self, worker_id: str) -> None:
        """Lets the worker finish within DRAIN_GRACE_S; returns when its process has ended."""

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        """Has the worker, which is empty or stands by, serve in that pool under a new epoch, with
        the weights that it has.
        """

    async def ended(self) -> None:
        """Until a worker's process has ended, since this returned last."""

    def alive(self) -> Mapping[str, Role]:
        """Workers whose process exists or was asked for."""

    def pending(self) -> Mapping[str, str]:
        """Those of them that no node has room for, and what is missing."""


@dataclass(slots=True)
class _Worker:
    pool: Role
    serving: bool = False  # has been ready, in a pool
    silent_looks: int = 0  # since it was last seen so
    looks_ready: int = 0  # at which it could be given work, or could join a pool
    draining_since: float | None = None
    drain_sent: bool = False
    grace_s: float | None = None  # that it was given to drain
    turns_to: PoolName | None = None  # once it is empty
    past_epoch: int = 0  # of its last role, whose entry may still be there
    foreign: bool = False  # another controller owns its process, and ends it once it is drained


class Actuator:
    """Owns the workers that it started, and as leader decides about those of other controllers
    too.
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
        """`initial` sizes hold until the registry knows others, and again should it lose them.

        lease: without one this actuator is alone with its registry, as in tests of it. rebalance: a
        worker changes over where one would be stopped in a pool and another started in the other.
        standby: workers of no pool to keep, which join a pool where one is missing.
        """
        self._registry = registry
        self._launcher = launcher
        self._lease = lease
        self._sizes = dict(initial)
        self._clock = clock or MonotonicClock()
        self._credentials = credentials
        self._rebalance = rebalance
        self._standby = standby
        self._drain_timeout_s = drain_timeout_s
        self._interval_s = interval_s
        self._workers: dict[str, _Worker] = {}
        self._deaths: dict[Role, Deaths] = {role: Deaths() for role in (*POOLS, "standby")}
        # A worker has been ready, so what they start with is not what keeps them from it
        self.has_served = False
        # Above those of the names that were given
        self._next_number: dict[Role, int] = dict.fromkeys(self._deaths, 0)

    async def run(self) -> None:
        """Until cancelled. While Redis does not answer, the workers stay as they are."""
        await poll_regularly(self.tick, self._interval_s, log, self._launcher.ended)

    async def leave(self) -> None:
        """Ends all workers: those that serve after their drain, the others at once."""
        await asyncio.gather(
            *(
                self._launcher.drain(worker_id)
                if worker.serving
                else self._launcher.stop(worker_id)
                for worker_id, worker in self._workers.items()
                if not worker.foreign
            )
        )

    async def tick(self) -> None:
        """One look, and what follows from it. Raises Unavailable."""
        if self._credentials is not None:
            self._credentials.trouble()  # is told in the log
        await self._registry.check_writable()  # or nobody's silence says anything
        if self._lease is not None and not self._lease.leads:
            await self._follow(succeeded=self._lease.succeeded)
            return
        infos = {
            info.worker_id: info
            for info in await self._registry.workers()
            if not self._is_past(info)
        }
        sizes = await self._wanted_sizes()
        drains, restarts = await self._registry.drains(), await self._registry.restarts()
        if self._lease is not None and self._lease.adopts:
            self._adopt(infos)
        standbys = (
            {one.worker_id: one for one in await self._registry.standbys()} if self._standby else {}
        )
        await self._note_deaths(infos)
        await self._note_states(infos, standbys)
        for worker_id, reason in self._launcher.pending().items():
            await self._registry.publish_pending(
                PendingWorker(worker_id, self._workers[worker_id].pool, reason)
            )
        for worker_id in drains | restarts:
            if worker_id in self._workers:
                if worker_id in drains:
                    self._drain(worker_id, "an operator asked for it")
            elif worker_id not in infos:
                await self._registry.clear_requests(worker_id)
        if self._rebalance:
            self._change_over("prefill", "decode", infos)
            self._change_over("decode", "prefill", infos)
        # A decode worker can do everything, so its pool gets the last standby worker.
        for pool in sorted(sizes, key=POOLS.index, reverse=self._standby > 0):
            await self._resize(pool, sizes[pool], infos, self._next_restart(pool, restarts))
        if self._standby:
            await self._keep_standbys(restarts)
        results = await asyncio.gather(
            *(
                self._carry_on_draining(worker_id, worker, worker.draining_since, infos)
                for worker_id, worker in list(self._workers.items())
                if worker.draining_since is not None
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _follow(self, *, succeeded: bool) -> None:
        """Does what is left to do for this process's own workers while it does not lead: the leader
        drains workers, and each controller ends those of its own that are empty. If another
        controller leads, it does not count those that have not served yet, so these end too.
        """
        infos = {
            info.worker_id: info
            for info in await self._registry.workers()
            if not self._is_past(info)
        }
        self._workers = {
            worker_id: worker for worker_id, worker in self._workers.items() if not worker.foreign
        }
        await self._note_deaths(infos)
        for worker_id, worker in list(self._workers.items()):
            info = infos.get(worker_id)
            if info is None:
                if succeeded and not worker.serving:
                    log.info("worker_start_cancelled", worker=worker_id)
                    await self._stop(worker_id, info)
                    if worker.pool == "standby":
                        await self._registry.remove_standby(worker_id)
                continue
            worker.serving = True
            if info.state != "draining":
                worker.draining_since = worker.turns_to = None  # the leader decides anew
                continue
            now = self._clock.now()
            since = worker.draining_since = worker.draining_since or now
            if info.load.empty or now - since >= self._drain_timeout_s + LATE_S:
                log.info("worker_stopping", worker=worker_id, load=info.load)
                await self._stop(worker_id, info)

    def _adopt(self, infos: Mapping[str, WorkerInfo]) -> None:
        """Counts workers that other controllers have started. Who can write to Redis could as well
        set the sizes.
        """
        for worker_id, info in infos.items():
            worker = self._workers.get(worker_id)
            mine = self._lease is not None and info.started_by == self._lease.owner
            if worker is None and not mine and info.state != "stuck":
                log.info(
                    "worker_adopted", worker=worker_id, started_by=info.started_by, term=info.term
                )
                self._workers[worker_id] = _Worker(info.pool, serving=True, foreign=True)
            elif worker is not None and worker.foreign:
                worker.pool = info.pool

    def _is_past(self, info: WorkerInfo) -> bool:
        worker = self._workers.get(info.worker_id)
        return worker is not None and info.epoch <= worker.past_epoch

    async def _wanted_sizes(self) -> dict[PoolName, int]:
        known = await self._registry.desired()
        lost = {pool: size for pool, size in self._sizes.items() if pool not in known}
        if self._lease is None:
            await self._registry.set_desired(lost)
        else:
            await self._registry.restore_desired(lost, self._lease.claim())
        self._sizes |= known
        return self._sizes

    async def _note_deaths(self, infos: Mapping[str, WorkerInfo]) -> None:
        alive = self._launcher.alive()
        mine = [worker_id for worker_id, worker in self._workers.items() if not worker.foreign]
        for worker_id in [worker_id for worker_id in mine if worker_id not in alive]:
            worker = self._workers.pop(worker_id)
            if worker.draining_since is None:
                self._note_death(worker)
            log.warning("worker_exited", worker=worker_id)
            await self._forget(worker_id, infos.get(worker_id))
            if worker.pool == "standby":
                await self._registry.remove_standby(worker_id)

    async def _note_states(
        self, infos: Mapping[str, WorkerInfo], standbys: Mapping[str, StandbyWorker]
    ) -> None:
        """Counts looks, not seconds: neither an outage of Redis nor a pause of this process is a
        worker's silence.
        """
        pending = self._launcher.pending()
        for worker_id, worker in list(self._workers.items()):
            info = infos.get(worker_id)
            if worker.pool == "standby" and worker_id in standbys:
                worker.looks_ready += standbys[worker_id].state == "ready"
                worker.silent_looks = 0 if worker.looks_ready else worker.silent_looks + 1
                continue
            match None if info is None else info.state:
                case "ready":
                    self.has_served = True
                    worker.serving, worker.silent_looks = True, 0
                    worker.looks_ready += 1
                    continue
                case "draining":
                    worker.serving, worker.silent_looks = True, 0
                    if worker.draining_since is None:
                        self._drain(worker_id, "it was told to end")  # by whoever runs its machine
                    worker.drain_sent = True
                    continue
                case "stuck" if worker.foreign:
                    log.warning("worker_stuck", worker=worker_id)
                    del self._workers[worker_id]
                    continue
                case "stuck":
                    log.warning("worker_stuck", worker=worker_id)
                    self._note_death(worker)
                    await self._stop(worker_id, info)
                    continue
            # Waits for a node, which may be made for it; that takes as long as it takes
            if worker_id in pending:
                continue
            worker.silent_looks += 1
            if worker.foreign:
                if worker_id in infos:  # it starts, which its owner watches
                    worker.silent_looks = 0
                elif worker.silent_looks * self._interval_s >= GONE_S:
                    log.warning("adopted_worker_gone", worker=worker_id, looks=worker.silent_looks)
                    del self._workers[worker_id]
                continue
            was_ready = worker.serving or worker.looks_ready > 0
            if worker.silent_looks * self._interval_s >= (SILENT_S if was_ready else START_S):
                what = "worker_silent" if was_ready else "worker_start_timeout"
                log.warning(what, worker=worker_id, looks=worker.silent_looks)
                self._note_death(worker)
                await self._stop(worker_id, None)

    def _note_death(self, worker: _Worker) -> None:
        """One that has served for a while says nothing against its successor, which comes at
        once.
        """
        if worker.looks_ready * self._interval_s < SETTLED_S:
            self._slow_down(worker.pool)

    def _slow_down(self, pool: Role) -> None:
        now = self._clock.now()
        self._deaths[pool] = self._deaths[pool].and_at(now)
        if (delay := self._deaths[pool].replace_at - now) > 0:
            log.warning(
                "pool_crash_loop",
                pool=pool,
                deaths=len(self._deaths[pool].times),
                wait_s=delay,
            )

    def _next_restart(self, pool: PoolName, asked: Collection[str]) -> str | None:
        """The worker of the pool whose successor is started next: one at a time, the oldest
        first.
        """
        mine = [one for one in asked if one in self._workers and self._workers[one].pool == pool]
        if any(self._workers[one].draining_since is not None for one in mine):
            return None
        # They come first, or one of them would be the successor
        if any(one in asked for one in self._standbys()):
            return None
        return min(mine, key=number_of, default=None)

    def _members(self, pool: PoolName) -> Members:
        staying = {
            one: worker
            for one, worker in self._workers.items()
            if worker.turns_to == pool or (worker.pool == pool and worker.draining_since is None)
        }
        # Those of other controllers go first, and cannot change over: their processes are not this
        # one's.
        serving = [one for one, worker in staying.items() if worker.serving and not worker.foreign]
        pending = [one for one in self._launcher.pending() if one in staying]
        return Members(self._sizes.get(pool, 0), list(staying), serving, pending)

    def _change_over(
        self, giver: PoolName, taker: PoolName, infos: Mapping[str, WorkerInfo]
    ) -> None:
        for worker_id in changing_over(self._members(giver), self._members(taker), infos):
            self._drain(worker_id, f"the {taker} pool has more use for it", turns_to=taker)

    async def _resize(
        self, pool: PoolName, size: int, infos: Mapping[str, WorkerInfo], leaving: str | None
    ) -> None:
        """Brings the pool to `size` workers, or to one more while `leaving` waits for a successor
        that is ready.
        """
        members = self._members(pool)
        staying = list(members.staying)
        here = [one for one in staying if self._workers[one].turns_to is None]
        ready = [one for one in here if one in infos and infos[one].state == "ready"]
        if leaving is not None and len(ready) > size:
            self._drain(leaving, "an operator asked for its restart, and its successor is ready")
            staying.remove(leaving)
            leaving = None
        missing = size + (leaving is not None) - len(staying)
        missing -= await self._join(pool, missing + len(members.pending))
        if leaving is not None and missing > 0 and len(self._standbys()) < self._standby:
            # A restart has time for the next standby worker, whose start costs no more
            missing -= 1
        if missing > 0 and self._clock.now() >= self._deaths[pool].replace_at:
            for _ in range(missing):
                await self._start(pool)
        for worker_id in surplus(staying, members.serving, infos, -missing):
            self._drain(worker_id, f"the pool is wanted at {size}")

    def _standbys(self) -> list[str]:
        """Those that can join a pool now, or once they are loaded."""
        return [
            one
            for one, it in self._workers.items()
            if it.pool == "standby" and it.draining_since is None
        ]

    async def _join(self, pool: PoolName, count: int) -> int:
        """Has up to `count` standby workers join the pool, whatever its workers died of: none of
        them costs a start.

        Returns how many do. One that is still loading is sooner there than one that starts.
        """
        loaded = [one for one in self._standbys() if self._workers[one].looks_ready]
        waiting = [one for one in self._standbys() if one not in self._launcher.pending()]
        chosen = joiners(waiting, loaded, max(0, count))
        for worker_id in chosen:
            log.info("standby_joins", worker=worker_id, pool=pool, ready=worker_id in loaded)
            async with self._in_time():
                await self._launcher.turn(worker_id, pool)
            self._workers[worker_id] = _Worker(pool)
            await self._registry.remove_standby(worker_id)
        return len(chosen)

    async def _keep_standbys(self, restarts: Collection[str]) -> None:
        """Starts standby workers, once the pools have theirs: a start takes the cores that a
        joining worker needs.

        A pool whose workers keep dying uses up standby workers as they come, so its delay holds for
        them, too.
        """
        standbys = self._standbys()
        if asked := [one for one in standbys if one in restarts]:
            if all(self._workers[one].looks_ready for one in standbys):
                self._drain(min(asked, key=number_of), "an operator asked for its restart")
            return
        pools_complete = all(one.serving for one in self._workers.values() if one.pool != "standby")
        if pools_complete and self._clock.now() >= max(
            deaths.replace_at for deaths in self._deaths.values()
        ):
            for _ in range(self._standby - len(standbys)):
                await self._start("standby")

    async def _start(self, pool: Role) -> None:
        worker_id = await self._next_name(pool)
        self._next_number[pool] = number_of(worker_id) + 1
        log.info("worker_starting", worker=worker_id)
        try:
            async with self._in_time():
                await self._launcher.start(pool, worker_id)
        except KvRelayError as error:
            if self._lease is not None and not self._lease.leads:
                raise
            log.error("worker_start_failed", worker=worker_id, reason=error.message)
            self._slow_down(pool)
        else:
            self._workers[worker_id] = _Worker(pool)

    async def _next_name(self, pool: Role) -> str:
        if self._lease is not None and self._lease.name_tag:
            return f"{pool}-{self._lease.name_tag}-{self._next_number[pool]}"
        return await self._registry.next_name(pool, self._next_number[pool])

    def _in_time(self) -> AbstractAsyncContextManager[None]:
        """For what must not happen once another controller leads. Raises Unavailable then."""
        return nullcontext() if self._lease is None else self._lease.in_time()

    def _drain(self, worker_id: str, reason: str, turns_to: PoolName | None = None) -> None:
        """Whatever was last said of what becomes of it then, holds."""
        worker = self._workers[worker_id]
        worker.turns_to = turns_to
        if worker.draining_since is None:
            worker.draining_since = self._clock.now()
            log.info("worker_draining", worker=worker_id, reason=reason, turns_to=turns_to)

    def _grace_s(self, info: WorkerInfo, infos: Mapping[str, WorkerInfo]) -> float:
        """Seconds for the worker's streams to end, after which it hands them back for others to go
        on with.
        """
        decoders = [one for one in infos.values() if one.pool == "decode" and one.state == "ready"]
        others = [one for one in decoders if one.worker_id != info.worker_id]
        if (
            info.pool == "decode"
            and others
            and not any(one.model.is_same(info.model) for one in others)
        ):
            return max(self._drain_timeout_s, VERSION_DRAIN_S)
        return self._drain_timeout_s

    async def _carry_on_draining(
        self, worker_id: str, worker: _Worker, since: float, infos: Mapping[str, WorkerInfo]
    ) -> None:
        """Stops the worker once it says that it is empty and takes no more. It hands back by itself
        what it still holds when its grace is over, so one that is not empty long after that is
        broken.
        """
        info = infos.get(worker_id)
        seconds = self._clock.now() - since
        if worker.foreign and (worker.drain_sent or info is None):
            return
        if worker.grace_s is None and info is not None:
            worker.grace_s = self._grace_s(info, infos)
        grace_s = self._drain_timeout_s if worker.grace_s is None else worker.grace_s
        if not worker.serving:
            log.info(
                "standby_stopping" if worker.pool == "standby" else "worker_start_cancelled",
                worker=worker_id,
            )
            await self._stop(worker_id, info)
            if worker.pool == "standby":
                await self._registry.remove_standby(worker_id)
        elif info is not None and info.state == "draining" and info.load.empty:
            log.info("worker_drained", worker=worker_id, seconds=seconds)
            if worker.turns_to is None:
                await self._stop(worker_id, info)
            else:
                await self._turn(worker_id, worker.turns_to, info)
        elif seconds >= grace_s + LATE_S:
            held = info.load if info is not None else None
            log.warning(
                "worker_drain_timeout",
                worker=worker_id,
                load=held,
            )
            await self._stop(worker_id, info)
        elif not worker.drain_sent and info is not None:
            try:
                async with self._in_time():
                    await drain_worker(info.address, grace_s, self._credentials)
                worker.drain_sent = True
            except KvRelayError as error:
                log.warning("worker_drain_unanswered", worker=worker_id, reason=error.message)

    async def _turn(self, worker_id: str, pool: PoolName, info: WorkerInfo) -> None:
        log.info("worker_switches_pool", worker=worker_id, pool=pool)
        self._workers[worker_id] = _Worker(pool, past_epoch=info.epoch)
        await self._launcher.turn(worker_id, pool)
        await self._registry.remove_worker(worker_id, info.epoch)

    async def _stop(self, worker_id: str, info: WorkerInfo | None) -> None:
        del self._workers[worker_id]
        await self._launcher.stop(worker_id)
        await self._forget(worker_id, info)

    async def _forget(self, worker_id: str, info: WorkerInfo | None) -> None:
        """Routers need not wait for the entry of a worker that is gone to expire."""
        if info is not None:
            await self._registry.remove_worker(worker_id, info.epoch)
        await self._registry.clear_requests(worker_id)


async def drain_worker(address: str, grace_s: float, credentials: Credentials | None) -> None:
    """Tells the worker at HOST:PORT to take no more work, and for how long it may keep what it has.

    Raises a KvRelayError.
    """
    async with worker_channel(address, credentials) as channel:
        try:
            await WorkerServiceStub(channel).Drain(
                pb.DrainRequest(grace_seconds=grace_s), timeout=_DRAIN_CALL_S
            )
        except grpc.RpcError as error:
            raise status.error_from_rpc(error, address) from None
