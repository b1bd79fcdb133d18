"""Starts a decode worker from its settings."""

from __future__ import annotations

from decode_worker.decode_stage import DecodeStage
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
    """Serves with a decode stage, on the engine of the pool; see
    `kvrelay.worker.runtime.host.serve`. vLLM loads the model by itself.
    """
    if settings.config.decode.engine == "vllm":
        # vLLM is optional, and takes seconds to import.
        from decode_worker.vllm_decode_stage import VllmDecodeStage
        from kvrelay.vllm_engine import serving

        return await serving.serve(settings, VllmDecodeStage, stop)
    return await host.serve(settings, DecodeStage, stop, model, runner)
