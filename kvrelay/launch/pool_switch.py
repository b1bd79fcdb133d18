"""The life of a worker's process: it serves in one pool, and may switch to the other pool with its
loaded weights.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.process.stop_request import StopRequest
from kvrelay.process.telemetry import get_logger
from kvrelay.types.workers import PoolName
from kvrelay.worker.runtime.settings import WorkerSettings

log = get_logger("worker")


class Roles:
    """Serves in one role after the other. Each role has its own epoch, server and KV memory. Owns
    the weights.

    The first call of the object drains and ends; the second call ends at once, like two SIGTERMs.
    """

    def __init__(self) -> None:
        self._stop = StopRequest()
        self._next: PoolName | None = None

    def __call__(self) -> None:
        self._next = None
        self._stop()

    def now(self) -> None:
        """Ends at once, even with requests in progress."""
        self._next = None
        self._stop.now()

    def turn(self, pool: PoolName) -> None:
        """Switches to `pool`. The worker must have been drained or be on standby, with its weights
        loaded or not. Does nothing if the worker was told to end.
        """
        if not self._stop.drain.is_set():
            self._next = pool
            self._stop.now()

    async def serve(self, settings: WorkerSettings) -> None:
        """Loads the weights, then serves until told to end, at first in the pool of the settings. A
        standby worker waits until it is told which pool to join.

        Raises ModelRefused, ConfigError, Unavailable, StepHung, RankLost.
        """
        # Imported here, because processes that launch workers import this module and do not need
        # torch.
        import decode_worker.main
        import prefill_worker.main
        from kv_transfer.transport_selection import host_id
        from kvrelay.worker.runtime.model_loading import load_weights
        from kvrelay.worker.runtime.standby import stand_by

        mains = {"prefill": prefill_worker.main, "decode": decode_worker.main}
        native = settings.config.pool(settings.pool).engine == "native"
        # vLLM loads the weights by itself.
        model = await load_weights(settings) if native else None
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
            # The runner's KV memory has been freed.
            runner = None
            if self._next is None:
                return
            log.info("pool_switch_started", worker=settings.worker_id, pool=self._next)
            settings = replace(settings, pool=self._next, last_epoch=epoch)
            self._next, self._stop = None, StopRequest()
