"""The sequences of a worker on vLLM, with all that the stages of both pools need of the engine."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.protocol_version import KV_INDEX, PROMPT_LOGPROBS
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.exchange import EXCHANGE
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.vllm_engine.nixl.remote_reads import RemoteReads
from kvrelay.vllm_engine.scheduler import Limits, VllmScheduler
from kvrelay.vllm_engine.step_loop import VllmStepLoop
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.stage import BlockCounts, StageLoad
from kvrelay.worker.steps.step_loop import Reporter


class VllmBatch:
    """vLLM has the batch, its blocks and the prefix cache. The worker's cache has the staging
    blocks.
    """

    def __init__(
        self, context: WorkerContext, engine: VllmEngine, model: VllmModel, *, leaves: bool
    ) -> None:
        """leaves: whether the KV of prompts leaves for a decode worker."""
        self._context = context
        self._engine = engine
        # KV that vLLM reads from other workers' vLLM; None if it passes through staging memory.
        self.reads = RemoteReads(context.clock) if context.config.transfer.in_vllm else None
        limits = Limits(
            model.max_model_len, model.eos_token_ids, engine.budget, engine.blocks.total
        )
        self.scheduler = VllmScheduler(
            context.cache, EXCHANGE, limits, leaves=leaves, reads=self.reads
        )
        # The index of vLLM's prefix cache, which routers ask for.
        self.findable = engine.cached_blocks(context.cache)
        # Features of the protocol that the engine does not have.
        self.lacks = frozenset({PROMPT_LOGPROBS} if self.findable else {PROMPT_LOGPROBS, KV_INDEX})

    @property
    def busy_blocks(self) -> float:
        """The share of vLLM's blocks that sequences hold: 0 to 1."""
        own = self._engine.blocks
        return own.held / max(1, own.total)

    def steps(self, reporter: Reporter) -> VllmStepLoop:
        """The loop that runs the sequences."""
        return VllmStepLoop(self._context, self._engine, self.scheduler, reporter, self.findable)

    def check_integrity(self) -> None:
        """Raises IntegrityError if vLLM holds blocks although it has no sequence."""
        self._engine.check_blocks(len(self.scheduler))

    def with_blocks(self, load: StageLoad) -> StageLoad:
        """The load with vLLM's blocks and the staging blocks, or those promised to leases."""
        own, pool = self._engine.blocks, self._context.cache.pool
        if self.reads is None:
            return replace(load, blocks=own.with_pool(pool))
        held = min(own.total, own.held + pool.num_held)
        return replace(load, blocks=BlockCounts(own.total, held, own.cached))
