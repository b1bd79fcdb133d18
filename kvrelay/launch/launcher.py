"""Starts, watches and stops workers. Each worker is a Ray actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autoscaler.lease import Lease
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, InvalidArgument, Unavailable
from kvrelay.launch.actor import WorkerActor
from kvrelay.launch.failed_start import FailedStart, failed_start
from kvrelay.launch.placement import Amounts, Node, needs, place, with_workers
from kvrelay.launch.ray_cluster import RayCluster
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.process.telemetry import LEVEL_VARIABLE, get_logger
from kvrelay.types import PoolName, Role
from kvrelay.worker.settings import WorkerSettings

_STOP_TIMEOUT_S = 5.0
_LOOK_S = 1.0
# Timeout for asking Ray about its nodes.
_ASK_S = 5.0

log = get_logger("launch")


def require_gpus(config: ClusterConfig, found: float, standby: int = 0) -> None:
    """Raises ConfigError if the initial workers need more GPUs than Ray found, because they would
    wait forever.
    """
    prefill, decode = config.prefill, config.decode
    needed = {
        "prefill": prefill.replicas * prefill.resources.num_gpus,
        "decode": decode.replicas * decode.resources.num_gpus,
        "standby": standby * decode.resources.num_gpus,
    }
    if sum(needed.values()) > found:
        each = ", ".join(
            f"{name} {amount:g}" for name, amount in needed.items() if amount or name != "standby"
        )
        raise ConfigError(
            f"resources.num_gpus: the workers need {sum(needed.values()):g} GPUs ({each}), and "
            f"Ray finds {found:g} on this machine; set num_gpus lower, for example 0.5 to "
            "share a GPU, or 0 for the CPU"
        )


@dataclass(slots=True, eq=False)
class _Running:
    role: Role
    needs: Amounts
    # The node of the worker, or the planned node until the worker has started. Empty while no node
    # has room.
    node_id: str
    actor: ActorHandle
    # The worker's process has reported its node.
    placed: bool = False
    # Why no node has room; empty if a node has.
    waits_for: str = ""
    ended: asyncio.Task[None] = field(init=False)


class RayLauncher:
    """Implements `autoscaler.actuator.Launcher` with Ray. `cluster` must be entered before and must
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
        self._running: dict[str, _Running] = {}
        self._refused: asyncio.Queue[InvalidArgument] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._failed: asyncio.Queue[FailedStart] = asyncio.Queue()

    def alive(self) -> Mapping[str, Role]:
        """Returns the workers whose actor was requested and has not ended, including pending
        workers.
        """
        return {worker_id: one.role for worker_id, one in self._running.items()}

    def pending(self) -> Mapping[str, str]:
        """Returns the alive workers that no node has room for, with the missing resources. They
        start when there is room. Nodes that Ray's own autoscaler adds for them count too.
        """
        return {
            worker_id: one.waits_for for worker_id, one in self._running.items() if one.waits_for
        }

    async def start(self, role: Role, worker_id: str) -> None:
        """Requests a worker from Ray. The worker is in the registry once it serves or stands by.
        Raises Unavailable if Ray does not answer, or if this controller is no longer the leader.
        """
        # The resources of a standby worker are equal in both pools.
        pool: PoolName = "decode" if role == "standby" else role
        section = self._settings.config.pool(pool)
        amounts = needs(section.resources)
        chosen = place(role, amounts, await self._nodes())
        node_id = "" if chosen.node is None else chosen.node.node_id
        # The variables are passed as an argument, not in Ray's runtime environment, whose agent
        # would have to start before the worker can.
        variables = {"OMP_NUM_THREADS": str(section.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if level := os.environ.get(LEVEL_VARIABLE):
            # The raylets of other hosts have their own environment.
            variables[LEVEL_VARIABLE] = level
        # Claimed only now, because the call to Ray may have been slow.
        claim = None if self._lease is None else self._lease.claim()
        actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=section.resources.num_cpus,
                num_gpus=section.resources.num_gpus,
                resources=section.resources.custom,
                scheduling_strategy=_strategy(node_id),
                # The actuator replaces dead workers, under a new epoch.
                max_restarts=0,
            )
            .remote(
                replace(
                    self._settings,
                    pool=pool,
                    worker_id=worker_id,
                    claim=claim,
                    standby=role == "standby",
                ),
                variables,
                self._template,
            )
        )
        running = self._running[worker_id] = _Running(role, amounts, node_id, actor)
        if chosen.node is None:
            self._note_pending(worker_id, running, chosen.reason)
        else:
            log.info("worker_placed", worker=worker_id, reason=chosen.reason)
        arrival = asyncio.create_task(self._note_arrival(worker_id, running))
        running.ended = asyncio.create_task(self._watch(worker_id, running, arrival))

    async def drain(self, worker_id: str) -> None:
        """Lets a worker finish its requests within DRAIN_GRACE_S, then stops the worker."""
        running = self._running.get(worker_id)
        if running is not None:
            running.actor.drain.remote()
            await asyncio.wait({running.ended}, timeout=DRAIN_GRACE_S + _STOP_TIMEOUT_S)
            await self.stop(worker_id)

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        """Switches a worker to another pool; it keeps its weights. The worker must have been
        drained, or stand by.
        """
        running = self._running.get(worker_id)
        if running is not None:
            running.role = pool
            running.actor.turn.remote(pool)

    async def ended(self) -> None:
        """Waits until the process of a worker has ended since the last return of this method. Ray
        reports an end within milliseconds.
        """
        await self._ended.wait()
        self._ended.clear()

    async def stop(self, worker_id: str) -> None:
        """Stops a worker now. Kills the worker if it does not end in time."""
        running = self._running.get(worker_id)
        if running is None:
            return
        if not running.waits_for:
            running.actor.stop.remote()
            await asyncio.wait({running.ended}, timeout=_STOP_TIMEOUT_S)
        ray.kill(running.actor)
        await running.ended

    async def stop_all(self) -> None:
        """Stops all workers now. Kills those that do not end in time."""
        await asyncio.gather(*(self.stop(worker_id) for worker_id in list(self._running)))

    async def refused(self) -> InvalidArgument:
        """Waits until a worker ends because its model or configuration cannot be served on its
        node. Returns the error.
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
            await asyncio.sleep(_LOOK_S)
            if any(not one.placed for one in self._running.values()):
                try:
                    self._note_room(await self._nodes())
                except Unavailable as error:
                    log.warning("placement_unknown", reason=error.message)

    def _note_room(self, nodes: list[Node]) -> None:
        """Updates `pending`. Places the waiting workers one after the other, so that each placement
        accounts for the earlier ones.
        """
        there = {node.node_id for node in nodes}
        for worker_id, one in self._running.items():
            if one.placed or (one.node_id in there and not one.waits_for):
                continue
            chosen = place(one.role, one.needs, with_workers(nodes, self._workers()))
            if chosen.node is None:
                one.node_id = ""
                self._note_pending(worker_id, one, chosen.reason)
            else:
                # Ray sees the free node too, and may choose another one.
                one.node_id, one.waits_for = chosen.node.node_id, ""

    async def _nodes(self) -> list[Node]:
        """Returns the nodes with this launcher's workers on them."""
        try:
            async with asyncio.timeout(_ASK_S):
                nodes = await asyncio.to_thread(self._cluster.nodes)
        except TimeoutError:
            raise Unavailable(f"Ray did not list its nodes within {_ASK_S:g} s") from None
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise Unavailable(f"Ray cannot list its nodes: {error}") from error
        return with_workers(nodes, self._workers())

    def _workers(self) -> list[tuple[str, Role, Amounts]]:
        return [(one.node_id, one.role, one.needs) for one in self._running.values()]

    def _note_pending(self, worker_id: str, running: _Running, reason: str) -> None:
        if running.waits_for != reason:
            log.warning("worker_waiting_for_resources", worker=worker_id, reason=reason)
        running.waits_for = reason

    async def _note_arrival(self, worker_id: str, running: _Running) -> None:
        """Records the node on which a worker has started. Raises RayError if the worker does not
        start; `_watch` reports the reason.
        """
        running.node_id = await asyncio.wrap_future(running.actor.node.remote().future())
        running.placed, running.waits_for = True, ""
        log.info("worker_process_started", worker=worker_id, node=running.node_id)

    async def _watch(self, worker_id: str, running: _Running, arrival: asyncio.Task[None]) -> None:
        try:
            await asyncio.wrap_future(running.actor.run.remote().future())
            log.info("worker_ended", worker=worker_id)
        except ray.exceptions.RayTaskError as error:
            log.error(
                "worker_failed", worker=worker_id, node=running.node_id, reason=str(error.cause)
            )
            if isinstance(error.cause, InvalidArgument):
                self._refused.put_nowait(error.cause)
            else:
                self._failed.put_nowait(failed_start(worker_id, error.cause, str(error.cause)))
        except ray.exceptions.RayError as error:
            log.warning(
                "worker_died",
                worker=worker_id,
                node=running.node_id,
                reason=str(error).splitlines()[0],
            )
            self._failed.put_nowait(failed_start(worker_id, None, str(error)))
        finally:
            await asyncio.gather(arrival, return_exceptions=True)
            del self._running[worker_id]
            self._ended.set()


def _strategy(node_id: str) -> NodeAffinitySchedulingStrategy | str:
    """Returns Ray's scheduling strategy: the given node, or another node if the given node has no
    room after all.
    """
    if not node_id:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(node_id, soft=True, _spill_on_unavailable=True)
