"""Runs a worker of the build in PYTHONPATH: `mixed_worker.py ORDER`.

ORDER is a JSON object with worker_id, pool, model, redis and config. The script uses only functions
that all builds since 0.1.0 have.
"""

from __future__ import annotations

import asyncio
import json
import sys

import decode_worker.main
import prefill_worker.main

try:
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.process.stop_request import StopRequest
    from kvrelay.process.telemetry import configure_logging, flush_logs
    from kvrelay.worker.runtime.settings import WorkerSettings
except ModuleNotFoundError:
    # A build of 0.1.
    from kvrelay.stop_request import StopRequest
    from kvrelay.telemetry import configure_logging, flush_logs
    from kvrelay.worker.settings import WorkerSettings

    from kvrelay.config import ClusterConfig


async def serve(order: dict[str, str]) -> None:
    """Runs the worker until it is stopped."""
    stop = StopRequest()
    stop.install()
    config = ClusterConfig.model_validate(order["config"])
    settings = WorkerSettings(
        order["worker_id"], order["pool"], order["model"], order["redis"], config
    )  # type: ignore[arg-type]
    main = prefill_worker.main if order["pool"] == "prefill" else decode_worker.main
    await main.serve(settings, stop)


if __name__ == "__main__":
    configure_logging("info")
    asyncio.run(serve(json.loads(sys.argv[1])))
    flush_logs()
