"""Starts a prefill worker from its settings."""

from __future__ import annotations

from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.stop_request import StopRequest
from kvrelay.worker.runtime import host
from kvrelay.worker.runtime.settings import WorkerSettings
from prefill_worker.prefill_stage import PrefillStage


async def serve(
    settings: WorkerSettings,
    stop: StopRequest,
    model: LoadedModel | None = None,
    runner: ModelRunner | None = None,
) -> int:
    """Serves with a prefill stage, on the engine of the pool; see
    `kvrelay.worker.runtime.host.serve`. vLLM loads the model by itself.
    """
    if settings.config.prefill.engine == "vllm":
        # vLLM is optional, and takes seconds to import.
        from kvrelay.vllm_engine import serving
        from prefill_worker.vllm_prefill_stage import VllmPrefillStage

        return await serving.serve(settings, VllmPrefillStage, stop)
    return await host.serve(settings, PrefillStage, stop, model, runner)
