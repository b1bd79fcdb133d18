"""The thread that runs the native engine's model."""

from __future__ import annotations

import asyncio
from functools import partial

from kvrelay.clock import Clock
from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sampling.sequence_faults import SegmentsFailed
from kvrelay.engine.sequence_segment import Segment
from kvrelay.process.telemetry import get_logger
from kvrelay.worker.steps.step_thread import StepThread
from kvrelay.worker.steps.warmup import WARMUP_STEPS, warmup_segment

log = get_logger(__name__)


class EngineThread(StepThread):
    """Runs the steps of one model in a thread of their own, so that the event loop stays free."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        super().__init__(lambda: runner.lost(), clock)
        self._runner = runner

    async def warm_up(self) -> None:
        """Runs the warm-up steps before user requests. The first compiles kernels and allocates
        memory, so that no request waits for that; the second measures the time of a step.
        """
        guidance = asyncio.create_task(asyncio.to_thread(self._runner.grammars.warm_up))
        if self._runner.warmup is None:
            for _ in range(WARMUP_STEPS):
                try:
                    await self.run([warmup_segment(self._runner)])
                except SegmentsFailed as failed:
                    log.warning("warmup_step_failed", reason=str(failed))
        else:
            self.watch.proven(*self._runner.warmup)
        await guidance
        self.proven = True

    async def run(
        self, segments: list[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        """Runs a step under the watch. Raises what `ModelRunner.run` raises."""
        tokens = sum(len(segment.token_ids) for segment in segments)
        return await self.timed(tokens, partial(self._runner.run, segments, on_layer))
