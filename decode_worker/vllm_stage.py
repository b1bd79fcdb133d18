"""The decode stage of a worker whose engine is vLLM."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.stage import DecodeStage
from kvrelay.vllm_engine.batch import VllmBatch
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.worker.batches import DecodeBatch
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.stage import StageLoad
from kvrelay.worker.steps.step_loop import Reporter, Steps


class VllmDecodeStage(DecodeStage):
    """Leases staging blocks for hand-offs; vLLM has the batch and its blocks."""

    def __init__(self, context: WorkerContext, engine: VllmEngine, model: VllmModel) -> None:
        self._vllm = VllmBatch(context, engine, model, leaves=False)
        self.findable, self.lacks = self._vllm.findable, self._vllm.lacks
        super().__init__(context)

    def _batch(self) -> tuple[DecodeBatch, Callable[[Reporter], Steps]]:
        return self._vllm.scheduler, self._vllm.steps

    def check_integrity(self) -> None:
        """Checks vLLM's own blocks. Raises IntegrityError."""
        self._vllm.check_integrity()

    def load(self) -> StageLoad:
        """The current load, with vLLM's blocks and the staging blocks."""
        return self._vllm.with_blocks(super().load())

    def _busy_share(self, blocks: float) -> float:
        return super()._busy_share(self._vllm.busy_blocks)
