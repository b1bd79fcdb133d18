"""Makes the pools as large as they are wanted: starts, drains, stops and replaces workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc

from autoscaler.backoff import Deaths
from kvrelay.clock import Clock, MonotonicClock
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.registry import Registry
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.telemetry import get_logger
from kvrelay.types import POOLS, PoolName, WorkerInfo
from kvrelay.wire import status
from kvrelay.wire.worker import WorkerServiceStub, pb

SILENT_S = 30.0  # a worker that sends no heartbeat for so long is stopped and replaced
START_S = 600.0  # as is one that has never sent any
_DRAIN_CALL_S = 5.0

log = get_logger("actuator")


class Launcher(Protocol):
    """Where worker processes come from."""

    async def start(self, pool: PoolName, worker_id: str) -> None:
        """Asks for a worker; it appears in the registry once it serves. Raises KvRelayError."""

    async def stop(self, worker_id: str) -> None:
        """Ends the worker now, whatever it holds."""

    def alive(self) -> Mapping[str, PoolName]:
        """Workers whose process exists or was asked for."""


@dataclass(slots=True)
class _Worker:
    pool: PoolName
    serving: bool = False  # has been in the registry
    silent_looks: int = 0  # since it was last there
    draining_since: float | None = None
    drain_sent: bool = False


class Actuator:
    """Owns the workers that it started."""

    def __init__(
        self,
        registry: Registry,
        launcher: Launcher,
        initial: Mapping[PoolName, int],
        *,
        clock: Clock | None = None,
        credentials: Credentials | None = None,
        drain_timeout_s: float = 30.0,
        interval_s: float = 0.5,
    ) -> None:
        """`initial` sizes hold until the registry knows others, and again should it lose them."""
        self._registry = registry
        self._launcher = launcher
        self._sizes = dict(initial)
        self._clock = clock or MonotonicClock()
        self._credentials = credentials
        self._drain_timeout_s = drain_timeout_s
        self._interval_s = interval_s
        self._workers: dict[str, _Worker] = {}
        self._deaths: dict[PoolName, Deaths] = {pool: Deaths() for pool in POOLS}
        self._started: dict[PoolName, int] = dict.fromkeys(POOLS, 0)  # names are not used twice

    async def run(self) -> None:
        """Until cancelled. While Redis does not answer, the workers stay as they are."""
        answered = True
        while True:
            try:
                await self.tick()
                answered = True
            except Unavailable as error:
                if answered:
                    log.warning("pools stay as they are", reason=error.message)
                answered = False
            await asyncio.sleep(self._interval_s)

    async def tick(self) -> None:
        """One look, and what follows from it. Raises Unavailable."""
        infos = {info.worker_id: info for info in await self._registry.workers()}
        sizes = await self._wanted_sizes()
        asked = await self._registry.drains()
        await self._note_deaths(infos)
        await self._note_silence(infos)
        for worker_id in asked:
            if worker_id in self._workers:
                self._drain(worker_id, "an operator asked for it")
            elif worker_id not in infos:
                await self._registry.clear_drain(worker_id)
        for pool, size in sizes.items():
            await self._resize(pool, size, infos)
        results = await asyncio.gather(
            *(
                self._carry_on_draining(worker_id, worker, worker.draining_since, infos.get(worker_id))
                for worker_id, worker in list(self._workers.items())
                if worker.draining_since is not None
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _wanted_sizes(self) -> dict[PoolName, int]:
        known = await self._registry.desired()
        lost = {pool: size for pool, size in self._sizes.items() if pool not in known}
        await self._registry.set_desired(lost)
        self._sizes |= known
        return self._sizes

    async def _note_deaths(self, infos: Mapping[str, WorkerInfo]) -> None:
        alive = self._launcher.alive()
        for worker_id in [worker_id for worker_id in self._workers if worker_id not in alive]:
            worker = self._workers.pop(worker_id)
            if worker.draining_since is None:
                self._note_death(worker.pool)
            log.warning("worker ended by itself", worker=worker_id)
            await self._forget(worker_id, infos.get(worker_id))

    async def _note_silence(self, infos: Mapping[str, WorkerInfo]) -> None:
        """Counts looks, not seconds: neither an outage of Redis nor a pause of this process is a worker's silence."""
        for worker_id, worker in list(self._workers.items()):
            if worker_id in infos:
                worker.serving, worker.silent_looks = True, 0
                continue
            worker.silent_looks += 1
            if worker.silent_looks * self._interval_s >= (SILENT_S if worker.serving else START_S):
                log.warning("worker sends no heartbeat", worker=worker_id, looks=worker.silent_looks)
                self._note_death(worker.pool)
                await self._stop(worker_id, None)

    def _note_death(self, pool: PoolName) -> None:
        now = self._clock.now()
        self._deaths[pool] = self._deaths[pool].and_at(now)
        if (delay := self._deaths[pool].replace_at - now) > 0:
            log.warning("pool's workers keep dying", pool=pool, deaths=len(self._deaths[pool].times), wait_s=delay)

    async def _resize(self, pool: PoolName, size: int, infos: Mapping[str, WorkerInfo]) -> None:
        staying = [
            one for one, worker in self._workers.items() if worker.pool == pool and worker.draining_since is None
        ]
        missing = size - len(staying)
        if missing > 0 and self._clock.now() >= self._deaths[pool].replace_at:
            for _ in range(missing):
                await self._start(pool)
        serving = {one for one in staying if self._workers[one].serving}
        for worker_id in surplus(staying, serving, infos, -missing):
            self._drain(worker_id, f"the pool is wanted at {size}")

    async def _start(self, pool: PoolName) -> None:
        worker_id = f"{pool}-{self._started[pool]}"
        self._started[pool] += 1
        log.info("worker starts", worker=worker_id)
        try:
            await self._launcher.start(pool, worker_id)
        except KvRelayError as error:
            log.error("worker did not start", worker=worker_id, reason=error.message)
            self._note_death(pool)
        else:
            self._workers[worker_id] = _Worker(pool)

    def _drain(self, worker_id: str, reason: str) -> None:
        worker = self._workers[worker_id]
        if worker.draining_since is None:
            worker.draining_since = self._clock.now()
            log.info("worker drains", worker=worker_id, reason=reason)

    async def _carry_on_draining(self, worker_id: str, worker: _Worker, since: float, info: WorkerInfo | None) -> None:
        """Stops the worker once it says that it is empty and takes no more, or when its time is up."""
        seconds = self._clock.now() - since
        if not worker.serving:
            log.info("start cancelled", worker=worker_id)
            await self._stop(worker_id, info)
        elif info is not None and info.state == "draining" and info.load.empty:
            log.info("worker is empty", worker=worker_id, seconds=seconds)
            await self._stop(worker_id, info)
        elif seconds >= self._drain_timeout_s:
            held = info.load if info is not None else None
            log.warning("drain took too long; stopped with what it held", worker=worker_id, load=held)
            await self._stop(worker_id, info)
        elif not worker.drain_sent and info is not None:
            try:
                await drain_worker(info.address, self._credentials)
                worker.drain_sent = True
            except KvRelayError as error:
                log.warning("worker does not answer to drain", worker=worker_id, reason=error.message)

    async def _stop(self, worker_id: str, info: WorkerInfo | None) -> None:
        del self._workers[worker_id]
        await self._launcher.stop(worker_id)
        await self._forget(worker_id, info)

    async def _forget(self, worker_id: str, info: WorkerInfo | None) -> None:
        """Routers need not wait for the entry of a worker that is gone to expire."""
        if info is not None:
            await self._registry.remove_worker(worker_id, info.epoch)
        await self._registry.clear_drain(worker_id)


def surplus(
    staying: Collection[str], serving: Collection[str], infos: Mapping[str, WorkerInfo], count: int
) -> list[str]:
    """The `count` workers that are missed least: those that are still starting, then the emptiest, the latest first."""

    def cost(worker_id: str) -> tuple[bool, float, int, int]:
        info = infos.get(worker_id)
        held = math.inf if info is None else info.load.running + info.load.waiting + info.load.leases
        cached = 0 if info is None else info.load.blocks_cached
        return worker_id in serving, held, cached, -int(worker_id.rpartition("-")[2])

    return sorted(staying, key=cost)[: max(0, count)]


async def drain_worker(address: str, credentials: Credentials | None) -> None:
    """Tells the worker at HOST:PORT to take no more work. Raises a KvRelayError."""
    async with worker_channel(address, credentials) as channel:
        try:
            await WorkerServiceStub(channel).Drain(pb.DrainRequest(), timeout=_DRAIN_CALL_S)
        except grpc.RpcError as error:
            raise status.error_from_rpc(error, address) from None
