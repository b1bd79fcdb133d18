"""Starts a decode worker from its settings."""

from __future__ import annotations

from decode_worker.stage import DecodeStage
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.stop_request import StopRequest
from kvrelay.worker.runtime import host
from kvrelay.worker.runtime.settings import WorkerSettings


async def serve(
    settings: WorkerSettings,
    stop: StopRequest,
    model: LoadedModel | None = None,
    runner: ModelRunner | None = None,
) -> int:
    """Serves with a decode stage; see `kvrelay.worker.runtime.host.serve`."""
    return await host.serve(settings, DecodeStage, stop, model, runner)
