"""Brings each pool to its wanted size: starts, drains, stops, replaces and restarts workers."""

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

# A worker that sends no heartbeat for this long is stopped and replaced.
SILENT_S = 30.0
# A worker that is not ready this long after its start is stopped and replaced.
START_S = 600.0
# A worker that dies after serving this long does not count towards the crash loop backoff.
SETTLED_S = 5.0
# Another controller's worker counts as gone when its entry is missing for this long.
GONE_S = 5.0
# Drain grace of the last worker of a model version. It covers a whole answer, because a stream
# cannot continue on a worker with another version.
VERSION_DRAIN_S = 600.0
# The controller stops a worker that is still not empty this long after its grace.
LATE_S = 30.0
_DRAIN_CALL_S = 5.0

log = get_logger("actuator")


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

    def pending(self) -> Mapping[str, str]:
        """Returns the live workers that no node has room for, each with the missing resource."""


@dataclass(slots=True)
class _Worker:
    pool: Role
    # The worker has been ready in a pool.
    serving: bool = False
    # Number of polls since the worker was last seen.
    silent_looks: int = 0
    # Number of polls in which the worker could take requests or join a pool.
    looks_ready: int = 0
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
        # True once any worker has been ready: the workers' configuration is then known to work.
        self.has_served = False
        # Next number of a worker name for each role. It is above all assigned numbers.
        self._next_number: dict[Role, int] = dict.fromkeys(self._deaths, 0)

    async def run(self) -> None:
        """Polls until cancelled. While Redis does not answer, the workers stay as they are."""
        await poll_regularly(self.tick, self._interval_s, log, self._launcher.ended)

    async def leave(self) -> None:
        """Ends all own workers. Serving workers drain first; the others stop at once."""
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
        # A decode worker can serve every request, so the decode pool gets the last standby worker.
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
        """Acts on this process's own workers while another controller leads or none does.

        The leader drains workers; each controller ends its own empty workers. A new leader does not
        count workers that have not served yet. If another controller has the lease, this method
        stops those workers too.
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
                # The leader decides again.
                worker.draining_since = worker.turns_to = None
                continue
            now = self._clock.now()
            since = worker.draining_since = worker.draining_since or now
            if info.load.empty or now - since >= self._drain_timeout_s + LATE_S:
                log.info("worker_stopping", worker=worker_id, load=info.load)
                await self._stop(worker_id, info)

    def _adopt(self, infos: Mapping[str, WorkerInfo]) -> None:
        """Counts the workers that other controllers have started. The entries need no further
        check: a process that can write to Redis can also set the pool sizes.
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
        """Counts polls instead of seconds, because an outage of Redis or a pause of this process
        does not mean that a worker is silent.
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
                        # The operator of the worker's machine ended it.
                        self._drain(worker_id, "it was told to end")
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
            # The worker waits for a node. The cluster may still be creating that node, so there is
            # no timeout.
            if worker_id in pending:
                continue
            worker.silent_looks += 1
            if worker.foreign:
                # The worker is starting. Its own controller watches the start.
                if worker_id in infos:
                    worker.silent_looks = 0
                elif worker.silent_looks * self._interval_s >= GONE_S:
                    log.warning(
                        "adopted_worker_gone", worker=worker_id, missed_polls=worker.silent_looks
                    )
                    del self._workers[worker_id]
                continue
            was_ready = worker.serving or worker.looks_ready > 0
            if worker.silent_looks * self._interval_s >= (SILENT_S if was_ready else START_S):
                what = "worker_silent" if was_ready else "worker_start_timeout"
                log.warning(what, worker=worker_id, missed_polls=worker.silent_looks)
                self._note_death(worker)
                await self._stop(worker_id, None)

    def _note_death(self, worker: _Worker) -> None:
        """Records the death for the backoff. The death of a worker that served for SETTLED_S does
        not delay its replacement.
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
        """Returns the pool's worker to restart next. Workers restart one at a time, the oldest
        first.
        """
        mine = [one for one in asked if one in self._workers and self._workers[one].pool == pool]
        if any(self._workers[one].draining_since is not None for one in mine):
            return None
        # Standby workers restart first; otherwise an outdated standby worker could be the
        # successor.
        if any(one in asked for one in self._standbys()):
            return None
        return min(mine, key=number_of, default=None)

    def _members(self, pool: PoolName) -> Members:
        staying = {
            one: worker
            for one, worker in self._workers.items()
            if worker.turns_to == pool or (worker.pool == pool and worker.draining_since is None)
        }
        # Other controllers' workers are not in `serving`, so they are drained first. They cannot
        # switch pools, because this process does not own their processes.
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
        """Brings the pool to `size` workers, or to `size` + 1 while `leaving` waits for its
        successor to be ready.
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
            # A restart can wait for the next standby worker. Its start costs the same.
            missing -= 1
        if missing > 0 and self._clock.now() >= self._deaths[pool].replace_at:
            for _ in range(missing):
                await self._start(pool)
        for worker_id in surplus(staying, members.serving, infos, -missing):
            self._drain(worker_id, f"the pool is wanted at {size}")

    def _standbys(self) -> list[str]:
        """Returns the standby workers that can join a pool now, or once they are loaded."""
        return [
            one
            for one, it in self._workers.items()
            if it.pool == "standby" and it.draining_since is None
        ]

    async def _join(self, pool: PoolName, count: int) -> int:
        """Moves up to `count` standby workers into the pool and returns the number of moved
        workers.

        The pool's crash loop backoff does not apply, because a join costs no start. A standby
        worker that is still loading is ready sooner than a new worker.
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
        """Starts missing standby workers once the pools are complete.

        A start takes the cores that a joining worker needs, so standby workers start last. A pool
        in a crash loop uses up standby workers, so the pools' backoff also delays the start of
        standby workers.
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
        """Returns a context for actions that must not happen once another controller leads. Raises
        Unavailable if the lease ends.
        """
        return nullcontext() if self._lease is None else self._lease.in_time()

    def _drain(self, worker_id: str, reason: str, turns_to: PoolName | None = None) -> None:
        """Marks the worker as draining. The last given `turns_to` replaces earlier values."""
        worker = self._workers[worker_id]
        worker.turns_to = turns_to
        if worker.draining_since is None:
            worker.draining_since = self._clock.now()
            log.info("worker_draining", worker=worker_id, reason=reason, turns_to=turns_to)

    def _grace_s(self, info: WorkerInfo, infos: Mapping[str, WorkerInfo]) -> float:
        """Returns the seconds that the worker's streams have to end. After that the worker hands
        the streams back, and other workers continue them.
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
        """Stops the worker once it reports that it is empty and draining.

        The worker hands back its remaining requests when its grace is over. A worker that is still
        not empty LATE_S after its grace is broken and is stopped.
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
        """Removes the worker's entry, so that routers need not wait for its expiry."""
        if info is not None:
            await self._registry.remove_worker(worker_id, info.epoch)
        await self._registry.clear_requests(worker_id)


async def drain_worker(address: str, grace_s: float, credentials: Credentials | None) -> None:
    """Tells the worker at HOST:PORT to accept no more requests and to finish its own within
    `grace_s` seconds. Raises a KvRelayError.
    """
    async with worker_channel(address, credentials) as channel:
        try:
            await WorkerServiceStub(channel).Drain(
                pb.DrainRequest(grace_seconds=grace_s), timeout=_DRAIN_CALL_S
            )
        except grpc.RpcError as error:
            raise status.error_from_rpc(error, address) from None
