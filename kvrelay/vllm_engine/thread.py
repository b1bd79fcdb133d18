"""The thread that runs vLLM."""

from __future__ import annotations

from functools import partial

from kvrelay.clock import Clock
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ModelRefused
from kvrelay.types.workers import PoolName
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.engine_config import reason
from kvrelay.worker.steps.step_thread import StepThread


class VllmThread(StepThread):
    """Loads vLLM and runs its steps, in a thread of its own."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda: "", clock)
        self._engine: VllmEngine | None = None

    async def load(self, config: ClusterConfig, pool: PoolName, model_path: str) -> VllmEngine:
        """Starts vLLM. Raises what `VllmEngine.load` raises."""
        self._engine = await self.call(partial(VllmEngine.load, config, pool, model_path))
        return self._engine

    async def warm_up(self) -> None:
        """Runs a prompt of vLLM's own twice, once for all calls: the first time compiles kernels,
        the second time is measured. Raises ModelRefused if vLLM has no kernel for the model.
        """
        if self.proven:
            return
        assert self._engine is not None, "vLLM is loaded before the first step"
        engine, tokens = self._engine, [0] * self._engine.warmup_tokens
        for _ in range(2):
            try:
                await self.timed(len(tokens), partial(engine.warm_up, tokens))
            # vLLM finds out in the first step what a machine lacks.
            except Exception as error:
                cache = ", set kv.prefix_cache: false" if engine.keeps_state else ""
                raise ModelRefused(
                    f"{engine.model_path}: vLLM cannot run its first step on this machine: "
                    f"{reason(error)}; choose another model.dtype{cache}, or another model"
                ) from error
        self.proven = True
