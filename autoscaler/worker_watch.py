"""Updates the records of the managed workers from the registry."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autoscaler.managed_workers import ManagedWorker, ManagedWorkers
from kvrelay.process.telemetry import get_logger
from kvrelay.types.workers import StandbyWorker, WorkerInfo

# A worker that sends no heartbeat for this long is stopped and replaced.
SILENT_S = 30.0
# A worker that is not ready this long after its start is stopped and replaced.
START_S = 600.0
# Another controller's worker counts as gone when its entry is missing for this long.
GONE_S = 5.0

log = get_logger("actuator")


class WorkerWatch:
    """Notices which workers are ready, draining, silent or stuck.

    The watch counts polls instead of seconds, because an outage of Redis or a pause of this process
    does not mean that a worker is silent.
    """

    def __init__(self, workers: ManagedWorkers, interval_s: float) -> None:
        """`interval_s` is the time between two polls."""
        # True once any worker has been ready: the workers' configuration is then known to work.
        self.has_served = False
        self._workers = workers
        self._interval_s = interval_s

    def adopt(self, infos: Mapping[str, WorkerInfo], owner: str) -> None:
        """Counts the workers that other controllers than `owner` have started. The entries need no
        further check: a process that can write to Redis can also set the pool sizes.
        """
        for worker_id, info in infos.items():
            worker = self._workers.by_id.get(worker_id)
            if worker is None and info.started_by != owner and info.state != "stuck":
                log.info(
                    "worker_adopted", worker=worker_id, started_by=info.started_by, term=info.term
                )
                self._workers.by_id[worker_id] = ManagedWorker(
                    info.pool, serving=True, foreign=True
                )
            elif worker is not None and worker.foreign:
                worker.pool = info.pool

    async def note_states(
        self,
        infos: Mapping[str, WorkerInfo],
        standbys: Mapping[str, StandbyWorker],
        pending: Collection[str],
    ) -> None:
        """Notes what each worker's entry says. Stops own workers that are stuck or silent."""
        for worker_id, worker in list(self._workers.by_id.items()):
            info = infos.get(worker_id)
            if worker.pool == "standby" and worker_id in standbys:
                worker.ready_polls += standbys[worker_id].state == "ready"
                if worker.ready_polls:
                    worker.silent_polls = 0
                else:
                    await self._note_silence(worker_id, worker, has_entry=True)
                continue
            match None if info is None else info.state:
                case "ready":
                    self.has_served = True
                    worker.serving, worker.silent_polls = True, 0
                    worker.ready_polls += 1
                case "draining":
                    worker.serving, worker.silent_polls = True, 0
                    if worker.draining_since is None:
                        # The operator of the worker's machine ended it.
                        self._workers.mark_draining(worker_id, "it was told to end")
                    worker.drain_sent = True
                case "stuck":
                    log.warning("worker_stuck", worker=worker_id)
                    if worker.foreign:
                        del self._workers.by_id[worker_id]
                    else:
                        self._workers.note_death(worker)
                        await self._workers.stop(worker_id, info, "a step took too long")
                # A pending worker waits for a node. The cluster may still be creating that node, so
                # there is no timeout.
                case _ if worker_id not in pending:
                    await self._note_silence(worker_id, worker, has_entry=info is not None)

    async def _note_silence(self, worker_id: str, worker: ManagedWorker, has_entry: bool) -> None:
        """Counts a poll in which the worker was neither ready nor draining."""
        worker.silent_polls += 1
        silent_s = worker.silent_polls * self._interval_s
        if worker.foreign:
            # The worker is starting. Its own controller watches the start.
            if has_entry:
                worker.silent_polls = 0
            elif silent_s >= GONE_S:
                log.warning(
                    "adopted_worker_gone", worker=worker_id, missed_polls=worker.silent_polls
                )
                del self._workers.by_id[worker_id]
            return
        was_ready = worker.serving or worker.ready_polls > 0
        if silent_s >= (SILENT_S if was_ready else START_S):
            event = "worker_silent" if was_ready else "worker_start_timeout"
            log.warning(event, worker=worker_id, missed_polls=worker.silent_polls)
            self._workers.note_death(worker)
            reason = "it was not ready in time" if not was_ready else "it sent no heartbeats"
            await self._workers.stop(worker_id, None, reason)
