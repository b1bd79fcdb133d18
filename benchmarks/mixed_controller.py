"""Runs the controller of the build in PYTHONPATH: `mixed_controller.py ORDER`.

ORDER is a JSON object with model, redis, config, folder (for logs) and trees (pool to the source
tree of its workers). The workers are processes instead of Ray actors, because all actors of a Ray
cluster run the same build. SIGTERM drains all workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from autoscaler.actuator import Actuator

try:
    from kvrelay.process.child import bound_to_parent
    from kvrelay.process.stop_request import StopRequest
    from kvrelay.process.telemetry import configure_logging, flush_logs
    from kvrelay.state.registry import Registry
except ModuleNotFoundError:
    # A build of 0.1.
    from kvrelay.child import bound_to_parent
    from kvrelay.registry import Registry
    from kvrelay.stop_request import StopRequest
    from kvrelay.telemetry import configure_logging, flush_logs

# Timeout of a worker that is stopped.
STOP_S = 5.0
# Timeout of a worker that is drained.
DRAIN_S = 60.0


class Processes:
    """The launcher of the actuator: each worker is a process."""

    def __init__(self, order: dict[str, object]) -> None:
        self._order = order
        self._processes: dict[str, tuple[str, asyncio.subprocess.Process]] = {}

    async def start(self, pool: str, worker_id: str) -> None:
        order = {name: self._order[name] for name in ("model", "redis", "config")}
        order |= {"worker_id": worker_id, "pool": pool}
        tree = self._order["trees"][pool]  # type: ignore[index]
        script = str(Path(__file__).with_name("mixed_worker.py"))
        log = os.open(
            Path(str(self._order["folder"]), f"{worker_id}.log"), os.O_WRONLY | os.O_CREAT, 0o600
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(sys.executable, script, json.dumps(order)),
                cwd=tree,
                env={**os.environ, "PYTHONPATH": tree},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._processes[worker_id] = pool, process

    async def stop(self, worker_id: str) -> None:
        await self._end(worker_id, (signal.SIGTERM, signal.SIGINT), STOP_S)

    async def drain(self, worker_id: str) -> None:
        await self._end(worker_id, (signal.SIGTERM,), DRAIN_S)

    async def turn(self, worker_id: str, pool: str) -> None:
        raise NotImplementedError("workers change their pool only with `rebalance`")

    def alive(self) -> Mapping[str, str]:
        return {
            name: pool for name, (pool, one) in self._processes.items() if one.returncode is None
        }

    async def ended(self) -> None:
        # Never returns, because the actuator polls.
        await asyncio.Event().wait()

    def pending(self) -> Mapping[str, str]:
        return {}

    async def _end(
        self, worker_id: str, signals: tuple[signal.Signals, ...], seconds: float
    ) -> None:
        process = self._processes[worker_id][1]
        with suppress(ProcessLookupError, TimeoutError):
            for number in signals:
                process.send_signal(number)
            async with asyncio.timeout(seconds):
                await process.wait()
                return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def control(order: dict[str, object]) -> None:
    """Runs the controller until SIGTERM, then drains its workers."""
    stop = StopRequest()
    stop.install()
    config = order["config"]
    sizes = {pool: config[pool]["replicas"] for pool in ("prefill", "decode")}  # type: ignore[index]
    async with await Registry.connect(str(order["redis"])) as registry:
        actuator = Actuator(registry, Processes(order), sizes, interval_s=0.2)  # type: ignore[arg-type]
        running = asyncio.create_task(actuator.run())
        stopping = asyncio.create_task(stop.drain.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await actuator.leave()


if __name__ == "__main__":
    configure_logging("info")
    asyncio.run(control(json.loads(sys.argv[1])))
    flush_logs()
