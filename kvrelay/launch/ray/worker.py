"""One worker as a Ray actor: its start, its node and its end."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvrelay.launch.actor import WorkerActor
from kvrelay.launch.host_placement import Amounts, Placement
from kvrelay.process.telemetry import LEVEL_VARIABLE, get_logger
from kvrelay.types.workers import Role
from kvrelay.worker.runtime.settings import WorkerSettings

log = get_logger("launch")


@dataclass(slots=True, eq=False)
class RayWorker:
    """A worker whose actor was requested from Ray and has not ended."""

    worker_id: str
    role: Role
    needs: Amounts
    # The node of the worker, or the planned node until the worker has started. Empty while no node
    # has room.
    node_id: str = ""
    # The worker's process has reported its node.
    arrived: bool = False
    # Why no node has room; empty if a node has.
    waits_for: str = ""
    # Nobody wants it any more while it waits. It has had no process.
    is_taken_back: bool = False
    actor: ActorHandle = field(init=False)
    ended: asyncio.Task[None] = field(init=False)

    def plan(self, placement: Placement) -> None:
        """Takes a placement. Ray sees the free nodes too, and may choose another one."""
        if placement.node is not None:
            self.node_id, self.waits_for = placement.node.node_id, ""
            return
        self.node_id = ""
        if self.waits_for != placement.reason:
            log.warning(
                "worker_waiting_for_resources", worker=self.worker_id, reason=placement.reason
            )
        self.waits_for = placement.reason

    def request(self, settings: WorkerSettings, template: str) -> None:
        """Requests the actor from Ray, on the planned node."""
        section = settings.config.pool(settings.pool)
        # The variables are passed as an argument, not in Ray's runtime environment, whose agent
        # would have to start before the worker can.
        variables = {"OMP_NUM_THREADS": str(section.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if level := os.environ.get(LEVEL_VARIABLE):
            # The raylets of other hosts have their own environment.
            variables[LEVEL_VARIABLE] = level
        actor = ray.remote(WorkerActor).options(
            num_cpus=section.resources.num_cpus,
            num_gpus=section.resources.num_gpus,
            resources=section.resources.custom,
            scheduling_strategy=_strategy(self.node_id),
            # The actuator replaces dead workers, under a new epoch.
            max_restarts=0,
        )
        self.actor = actor.remote(settings, variables, template)

    async def run(self) -> None:
        """Waits until the worker has ended. Raises the RayError that ended it."""
        # An actor runs its calls in the order in which they were made, and `run` answers nothing
        # while it imports torch.
        node = asyncio.wrap_future(self.actor.node.remote().future())
        ended = asyncio.wrap_future(self.actor.run.remote().future())
        arrival = asyncio.create_task(self._arrive(node))
        try:
            await ended
        finally:
            await asyncio.gather(arrival, return_exceptions=True)

    async def _arrive(self, node: asyncio.Future[str]) -> None:
        """Waits until the worker's process has started, and records its node. Raises RayError if
        the worker does not start; `run` raises the reason.
        """
        self.node_id = await node
        self.arrived, self.waits_for = True, ""
        log.info("worker_process_started", worker=self.worker_id, node=self.node_id)


def _strategy(node_id: str) -> NodeAffinitySchedulingStrategy | str:
    """Returns Ray's scheduling strategy: the given node, or another node if the given node has no
    room after all.
    """
    if not node_id:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(node_id, soft=True, _spill_on_unavailable=True)
