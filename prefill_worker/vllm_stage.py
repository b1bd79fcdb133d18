"""The prefill stage of a worker whose engine is vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from kvrelay.protocol_version import KV_INDEX, PROMPT_LOGPROBS
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.exchange import EXCHANGE
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.vllm_engine.scheduler import Limits, VllmScheduler
from kvrelay.vllm_engine.step_loop import VllmStepLoop
from kvrelay.worker.batches import PrefillBatch
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.stage import StageLoad
from kvrelay.worker.steps.step_loop import Reporter, Steps
from prefill_worker.stage import PrefillStage


class VllmPrefillStage(PrefillStage):
    """Pushes from staging blocks, to which each step copies the KV that vLLM computed."""

    fetches: ClassVar[bool] = False

    def __init__(self, context: WorkerContext, engine: VllmEngine, model: VllmModel) -> None:
        self._engine = engine
        self._model = model
        super().__init__(context)

    def _batch(self) -> tuple[PrefillBatch, Callable[[Reporter], Steps]]:
        context, engine, model = self._context, self._engine, self._model
        limits = Limits(
            model.max_model_len, model.eos_token_ids, engine.budget, engine.blocks.total
        )
        scheduler = VllmScheduler(context.cache, EXCHANGE, limits, leaves=True)
        self.findable = cached = engine.cached_blocks(context.cache)
        self.lacks = frozenset({PROMPT_LOGPROBS} if cached else {PROMPT_LOGPROBS, KV_INDEX})
        return scheduler, lambda reporter: VllmStepLoop(
            context, engine, scheduler, reporter, cached
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError if vLLM holds blocks although it has no sequence."""
        self._engine.check_blocks(len(self.scheduler))

    def load(self) -> StageLoad:
        """The current load, with vLLM's blocks and the staging blocks."""
        blocks = self._engine.blocks.with_pool(self._context.cache.pool)
        return replace(super().load(), blocks=blocks)
