"""What a worker's process does: it serves in one pool, and may change over to the other with its weights."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.stop_request import StopRequest
from kvrelay.telemetry import get_logger
from kvrelay.types import PoolName
from kvrelay.worker.settings import WorkerSettings

log = get_logger("worker")


class Roles:
    """One role after the other, each with an epoch, a server and KV memory of its own. Owns the weights.

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
        """From now on serves in `pool`: for a worker that has been drained. One that was told to end, ends."""
        if not self._stop.drain.is_set():
            self._next = pool
            self._stop.now()

    async def serve(self, settings: WorkerSettings) -> None:
        """Loads the weights, then serves, first in the settings' pool, until told to end.

        Raises ModelRefused, ConfigError, Unavailable, StepHung, RankLost.
        """
        # Not at the top: whoever launches workers imports this and needs no torch.
        import decode_worker.main
        import prefill_worker.main
        from kvrelay.worker.host import load_weights

        mains = {"prefill": prefill_worker.main, "decode": decode_worker.main}
        model = await load_weights(settings)
        while True:
            epoch = await mains[settings.pool].serve(settings, self._stop, model)
            if self._next is None:
                return
            log.info("changes its pool", worker=settings.worker_id, pool=self._next)
            settings = replace(settings, pool=self._next, last_epoch=epoch)
            self._next, self._stop = None, StopRequest()
