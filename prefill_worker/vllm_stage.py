"""The prefill stage of a worker whose engine is vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvrelay.vllm_engine.batch import VllmBatch
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.worker.batches import PrefillBatch
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.stage import StageLoad
from kvrelay.worker.steps.step_loop import Reporter, Steps
from prefill_worker.stage import PrefillStage


class VllmPrefillStage(PrefillStage):
    """Pushes from staging blocks, to which each step copies the KV that vLLM computed."""

    fetches: ClassVar[bool] = False

    def __init__(self, context: WorkerContext, engine: VllmEngine, model: VllmModel) -> None:
        self._vllm = VllmBatch(context, engine, model, leaves=True)
        self.findable, self.lacks = self._vllm.findable, self._vllm.lacks
        super().__init__(context)

    def _batch(self) -> tuple[PrefillBatch, Callable[[Reporter], Steps]]:
        return self._vllm.scheduler, self._vllm.steps

    def check_integrity(self) -> None:
        """Checks vLLM's own blocks. Raises IntegrityError."""
        self._vllm.check_integrity()

    def load(self) -> StageLoad:
        """The current load, with vLLM's blocks and the staging blocks."""
        return self._vllm.with_blocks(super().load())
