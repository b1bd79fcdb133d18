"""Drains workers: no new requests, then the end of the process or a switch of the pool."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from autoscaler.managed_workers import ManagedWorker, ManagedWorkers
from kvrelay.clock import Clock
from kvrelay.errors import KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire import status
from kvrelay.wire.worker import WorkerServiceStub, pb

# Drain grace of the last worker of a model version. It covers a whole answer, because a stream
# cannot continue on a worker with another version.
VERSION_DRAIN_S = 600.0
# The controller stops a worker that is still not empty this long after its grace.
LATE_S = 30.0
_DRAIN_CALL_S = 5.0

log = get_logger("actuator")


class WorkerDrain:
    """Carries on the drains of the managed workers that are marked as draining."""

    def __init__(
        self,
        workers: ManagedWorkers,
        clock: Clock,
        credentials: Credentials | None,
        drain_timeout_s: float,
    ) -> None:
        """`drain_timeout_s` is the grace that a worker's streams have to end."""
        self._workers = workers
        self._clock = clock
        self._credentials = credentials
        self._drain_timeout_s = drain_timeout_s

    async def carry_on(
        self, worker_id: str, worker: ManagedWorker, infos: Mapping[str, WorkerInfo]
    ) -> None:
        """Stops the worker once it reports that it is empty and draining.

        The worker hands back its remaining requests when its grace is over. A worker that is still
        not empty LATE_S after its grace is broken and is stopped.
        """
        assert worker.draining_since is not None, "the worker is not marked as draining"
        info = infos.get(worker_id)
        seconds = self._clock.now() - worker.draining_since
        if worker.foreign and (worker.drain_sent or info is None):
            return
        if worker.grace_s is None and info is not None:
            worker.grace_s = self._grace_s(info, infos)
        grace_s = self._drain_timeout_s if worker.grace_s is None else worker.grace_s
        if not worker.serving:
            event = "standby_stopping" if worker.pool == "standby" else "worker_start_cancelled"
            log.info(event, worker=worker_id)
            await self._workers.stop(worker_id, info)
        elif info is not None and info.state == "draining" and info.load.empty:
            log.info("worker_drained", worker=worker_id, seconds=seconds)
            if worker.turns_to is None:
                await self._workers.stop(worker_id, info)
            else:
                await self._workers.switch(worker_id, worker.turns_to, info)
        elif seconds >= grace_s + LATE_S:
            load = info.load if info is not None else None
            log.warning("worker_drain_timeout", worker=worker_id, load=load)
            await self._workers.stop(worker_id, info)
        elif not worker.drain_sent and info is not None:
            try:
                async with self._workers.in_time():
                    await drain_worker(info.address, grace_s, self._credentials)
                worker.drain_sent = True
            except KvRelayError as error:
                log.warning("worker_drain_unanswered", worker=worker_id, reason=error.message)

    def _grace_s(self, info: WorkerInfo, infos: Mapping[str, WorkerInfo]) -> float:
        """Returns the seconds that the worker's streams have to end. After that the worker hands
        the streams back, and other workers continue them.
        """
        others = [
            one
            for one in infos.values()
            if one.pool == "decode" and one.state == "ready" and one.worker_id != info.worker_id
        ]
        is_last_of_version = not any(one.model.is_same(info.model) for one in others)
        if info.pool == "decode" and others and is_last_of_version:
            return max(self._drain_timeout_s, VERSION_DRAIN_S)
        return self._drain_timeout_s

    async def stop_if_drained(self, worker_id: str, info: WorkerInfo) -> None:
        """Stops an own worker that another controller drains, once it is empty or late."""
        worker = self._workers.by_id[worker_id]
        now = self._clock.now()
        since = worker.draining_since = worker.draining_since or now
        if info.load.empty or now - since >= self._drain_timeout_s + LATE_S:
            log.info("worker_stopping", worker=worker_id, load=info.load)
            await self._workers.stop(worker_id, info)


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
