"""What a worker's process does: it serves in one pool, and may change over to the other with its
weights.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.process.stop_request import StopRequest
from kvrelay.process.telemetry import get_logger
from kvrelay.types import PoolName
from kvrelay.worker.settings import WorkerSettings

log = get_logger("worker")


class Roles:
    """One role after the other, each with an epoch, a server and KV memory of its own. Owns the
    weights.

    Called, it drains and ends; called again, it ends at once: as for a process that gets SIGTERM.
    """

    def __init__(self) -> None:
        self._stop = StopRequest()
        self._next: PoolName | None = None

    def __call__(self) -> None:
        self._next = None
        self._stop()

    def now(self) -> None:
        """Ends, whatever it holds."""
        self._next = None
        self._stop.now()

    def turn(self, pool: PoolName) -> None:
        """From now on serves in `pool`: for a worker that has been drained, or that stands by,
        loaded or not yet. One that was told to end, ends.
        """
        if not self._stop.drain.is_set():
            self._next = pool
            self._stop.now()

    async def serve(self, settings: WorkerSettings) -> None:
        """Loads the weights, then serves, first in the settings' pool, until told to end. A standby
        worker waits until it is told which pool to join.

        Raises ModelRefused, ConfigError, Unavailable, StepHung, RankLost.
        """
        # Not at the top: whoever launches workers imports this and needs no torch.
        import decode_worker.main
        import prefill_worker.main
        from kv_transfer.transport_selection import host_id
        from kvrelay.worker.host import load_weights
        from kvrelay.worker.standby import stand_by

        mains = {"prefill": prefill_worker.main, "decode": decode_worker.main}
        model = await load_weights(settings)
        runner = None
        if settings.standby:
            prepared = await stand_by(settings, model, host_id(), self._stop)
            if self._next is None:
                prepared.close()
                return
            runner = prepared.take(self._next)
            log.info(
                "standby_joins",
                worker=settings.worker_id,
                pool=self._next,
                prepared=runner is not None,
            )
            settings = replace(settings, pool=self._next, standby=False)
            self._next, self._stop = None, StopRequest()
        while True:
            epoch = await mains[settings.pool].serve(settings, self._stop, model, runner)
            runner = None  # its KV memory is gone
            if self._next is None:
                return
            log.info("pool_switch_started", worker=settings.worker_id, pool=self._next)
            settings = replace(settings, pool=self._next, last_epoch=epoch)
            self._next, self._stop = None, StopRequest()
