"""Starts, watches and stops workers. Each worker is a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ray

from autoscaler.lease import Lease
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, InvalidArgument, Unavailable
from kvrelay.launch.failed_start import FailedStart, RefusedStart, failed_start
from kvrelay.launch.host_placement import Amounts, Node, needs, place, with_workers
from kvrelay.launch.ray.cluster import RayCluster
from kvrelay.launch.ray.worker import RayWorker
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.process.telemetry import get_logger
from kvrelay.types.workers import PoolName, Role
from kvrelay.worker.runtime.settings import WorkerSettings

_STOP_TIMEOUT_S = 5.0
_POLL_S = 1.0
# Timeout for asking Ray about its nodes.
_ASK_S = 5.0

log = get_logger("launch")


def require_gpus(pools: Sequence[tuple[ClusterConfig, int]], found: float) -> None:
    """Raises ConfigError if the initial workers need more GPUs than Ray found, because they would
    wait forever. `pools`: the configuration of each model, and its standby workers.
    """
    needed = {"prefill": 0.0, "decode": 0.0, "standby": 0.0}
    for config, standby in pools:
        sizes = {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
        for role, size in (*sizes.items(), ("standby", standby)):
            pool = config.prefill if role == "prefill" else config.decode
            needed[role] += size * pool.resources.num_gpus
    if sum(needed.values()) > found:
        each = ", ".join(
            f"{name} {amount:g}" for name, amount in needed.items() if amount or name != "standby"
        )
        raise ConfigError(
            f"resources.num_gpus: the workers need {sum(needed.values()):g} GPUs ({each}), and "
            f"Ray finds {found:g} on this machine; set num_gpus lower, for example 0.5 to "
            "share a GPU, or 0 for the CPU"
        )


class RayLauncher:
    """Implements `autoscaler.launcher.Launcher` with Ray. `cluster` must be entered before and must
    outlive the launcher.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        cluster: RayCluster,
        lease: Lease | None = None,
        template: str = "",
    ) -> None:
        """`settings` holds the settings of every worker, except its id, its pool and the claim of
        `lease`. `template` is the socket of this machine's template process, or empty.
        """
        self._template = template
        self._settings = settings
        self._cluster = cluster
        self._lease = lease
        self._workers: dict[str, RayWorker] = {}
        self._refused: asyncio.Queue[RefusedStart] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._failed: asyncio.Queue[FailedStart] = asyncio.Queue()
        # By worker, until they are told.
        self._causes: dict[str, str] = {}

    def alive(self) -> Mapping[str, Role]:
        """Returns the workers whose actor was requested and has not ended, including pending
        workers.
        """
        return {worker_id: worker.role for worker_id, worker in self._workers.items()}

    def cause_of_death(self, worker_id: str) -> str:
        """See Launcher."""
        return self._causes.pop(worker_id, "its process ended")

    def pending(self) -> Mapping[str, str]:
        """Returns the alive workers that no node has room for, with the missing resources. They
        start when there is room. Nodes that Ray's own autoscaler adds for them count too.
        """
        return {
            worker_id: worker.waits_for
            for worker_id, worker in self._workers.items()
            if worker.waits_for
        }

    async def start(self, role: Role, worker_id: str) -> None:
        """Requests a worker from Ray. The worker is in the registry once it serves or stands by.
        Raises Unavailable if Ray does not answer, or if this controller is no longer the leader.
        """
        # The resources of a standby worker are equal in both pools.
        pool: PoolName = "decode" if role == "standby" else role
        worker = RayWorker(worker_id, role, needs(self._settings.config.pool(pool).resources))
        placement = place(role, worker.needs, await self._nodes())
        # Claimed only now, because the call to Ray may have been slow.
        claim = None if self._lease is None else self._lease.claim()
        worker.plan(placement)
        settings = replace(
            self._settings,
            pool=pool,
            worker_id=worker_id,
            claim=claim,
            standby=role == "standby",
        )
        worker.request(settings, self._template)
        if placement.node is not None:
            log.info("worker_placed", worker=worker_id, reason=placement.reason)
        self._workers[worker_id] = worker
        worker.ended = asyncio.create_task(self._watch(worker))

    async def drain(self, worker_id: str) -> None:
        """Lets a worker finish its requests within DRAIN_GRACE_S, then stops the worker."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.actor.drain.remote()
            await asyncio.wait({worker.ended}, timeout=DRAIN_GRACE_S + _STOP_TIMEOUT_S)
            await self.stop(worker_id)

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        """Switches a worker to another pool; it keeps its weights. The worker must have been
        drained, or stand by.
        """
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.role = pool
            worker.actor.turn.remote(pool)

    async def ended(self) -> None:
        """Waits until the process of a worker has ended since the last return of this method. Ray
        reports an end within milliseconds.
        """
        await self._ended.wait()
        self._ended.clear()

    async def stop(self, worker_id: str) -> None:
        """Stops a worker now. Kills the worker if it does not end in time."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.is_taken_back = bool(worker.waits_for)
        if not worker.is_taken_back:
            worker.actor.stop.remote()
            await asyncio.wait({worker.ended}, timeout=_STOP_TIMEOUT_S)
        ray.kill(worker.actor)
        await worker.ended

    async def stop_all(self) -> None:
        """Stops all workers now. Kills those that do not end in time."""
        await asyncio.gather(*(self.stop(worker_id) for worker_id in list(self._workers)))

    async def refused(self) -> RefusedStart:
        """Waits until a worker ends because its model or configuration cannot be served on its
        node.
        """
        return await self._refused.get()

    async def failed(self) -> FailedStart:
        """Waits until a worker ends by itself for any other reason. Returns the failure. The worker
        may have served before.
        """
        return await self._failed.get()

    async def look_for_room(self) -> None:
        """Keeps `pending` up to date until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            if not all(worker.arrived for worker in self._workers.values()):
                try:
                    self._note_room(await self._nodes())
                except Unavailable as error:
                    log.warning("placement_unknown", reason=error.message)

    def _note_room(self, nodes: list[Node]) -> None:
        """Updates `pending`. Places the waiting workers one after the other, so that each placement
        accounts for the earlier ones.
        """
        node_ids = {node.node_id for node in nodes}
        for worker in self._workers.values():
            if worker.arrived or (worker.node_id in node_ids and not worker.waits_for):
                continue
            placed = with_workers(nodes, self._reservations())
            worker.plan(place(worker.role, worker.needs, placed))

    async def _nodes(self) -> list[Node]:
        """Returns the nodes with this launcher's workers on them."""
        try:
            async with asyncio.timeout(_ASK_S):
                nodes = await asyncio.to_thread(self._cluster.nodes)
        except TimeoutError:
            raise Unavailable(f"Ray did not list its nodes within {_ASK_S:g} s") from None
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise Unavailable(f"Ray cannot list its nodes: {error}") from error
        return with_workers(nodes, self._reservations())

    def _reservations(self) -> list[tuple[str, Role, Amounts]]:
        return [(worker.node_id, worker.role, worker.needs) for worker in self._workers.values()]

    async def _watch(self, worker: RayWorker) -> None:
        """Waits until the worker has ended. Reports a failure to `refused` or `failed`."""
        try:
            await worker.run()
            log.info("worker_ended", worker=worker.worker_id)
        except ray.exceptions.RayTaskError as error:
            cause, text = error.cause, str(error.cause)
            log.error("worker_failed", worker=worker.worker_id, node=worker.node_id, reason=text)
            if isinstance(cause, InvalidArgument):
                self._refused.put_nowait(RefusedStart(worker.role, cause))
            else:
                self._failed.put_nowait(failed_start(worker.worker_id, cause, text))
        except ray.exceptions.RayError as error:
            if worker.is_taken_back:
                log.info("worker_ended", worker=worker.worker_id)
                return
            text = str(error)
            if isinstance(error, ray.exceptions.OutOfMemoryError):
                self._causes[worker.worker_id] = "its host ran out of memory"
            log.warning(
                "worker_died",
                worker=worker.worker_id,
                node=worker.node_id,
                reason=text.splitlines()[0],
            )
            self._failed.put_nowait(failed_start(worker.worker_id, None, text))
        finally:
            del self._workers[worker.worker_id]
            self._ended.set()
