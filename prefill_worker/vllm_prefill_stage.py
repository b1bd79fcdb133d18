"""The prefill stage of a worker whose engine is vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvrelay.errors import Internal
from kvrelay.vllm_engine.batch import VllmBatch
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.worker.batches import PrefillBatch
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.stage import StageLoad
from kvrelay.worker.steps.step_loop import Reporter, Steps
from kvrelay.worker_messages import SequenceTokens
from prefill_worker.prefill_stage import PrefillStage, Relay


class VllmPrefillStage(PrefillStage):
    """Pushes from staging blocks, to which each step copies the KV that vLLM computed. With
    vllm-nixl, the KV stays where it is, and the commit tells where.
    """

    fetches: ClassVar[bool] = False

    def __init__(self, context: WorkerContext, engine: VllmEngine, model: VllmModel) -> None:
        self._vllm = VllmBatch(context, engine, model, leaves=True)
        self.findable, self.lacks = self._vllm.findable, self._vllm.lacks
        super().__init__(context)

    def _batch(self) -> tuple[PrefillBatch, Callable[[Reporter], Steps]]:
        return self._vllm.scheduler, self._vllm.steps

    def _finish(self, relay: Relay, tokens: SequenceTokens) -> None:
        """Raises Internal if vLLM holds no blocks to read."""
        if self._vllm.reads is not None:
            relay.in_vllm = self._vllm.scheduler.take_held(relay.sequence)
            if relay.in_vllm is None:
                raise Internal("vLLM holds no blocks of the prompt for the decode worker")
        super()._finish(relay, tokens)

    def _release(self, relay: Relay) -> None:
        if relay.in_vllm is not None and not (relay.push and relay.push.may_be_taken):
            # Otherwise the decode worker's vLLM ends the hold, or its time does.
            self._vllm.scheduler.release(relay.in_vllm)
        super()._release(relay)

    def check_integrity(self) -> None:
        """Checks vLLM's own blocks. Raises IntegrityError."""
        self._vllm.check_integrity()

    def load(self) -> StageLoad:
        """The current load, with vLLM's blocks and the staging blocks."""
        return self._vllm.with_blocks(super().load())
