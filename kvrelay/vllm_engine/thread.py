"""The thread that runs vLLM."""

from __future__ import annotations

from functools import partial

from kvrelay.clock import Clock
from kvrelay.config.schema import ClusterConfig
from kvrelay.types.workers import PoolName
from kvrelay.vllm_engine.engine import VllmEngine
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
        """Runs a prompt of vLLM's own twice: the first time compiles kernels, the second time is
        measured.
        """
        assert self._engine is not None, "vLLM is loaded before the first step"
        tokens = [0] * min(32, self._engine.max_model_len - 2)
        for _ in range(2):
            await self.timed(len(tokens), partial(self._engine.warm_up, tokens))
        self.proven = True
