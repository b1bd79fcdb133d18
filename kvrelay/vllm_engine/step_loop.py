"""The main loop of a worker on vLLM: vLLM schedules and runs, the worker reports."""

from __future__ import annotations

import asyncio
from functools import partial

from kvrelay.process.telemetry import get_logger
from kvrelay.vllm_engine.cached_blocks import CachedBlocks
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.scheduler import VllmScheduler
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.steps.step_loop import Reporter

# Seconds between steps that compute nothing, because vLLM waits for blocks.
_PAUSE_S = 0.002

log = get_logger(__name__)


class VllmStepLoop:
    """Runs steps while there is work. Between two steps, sequences come and go.

    A step that raises leaves vLLM in an unknown state, so the loop ends with its error, and the
    worker with the loop. Routers continue the sequences on other workers.
    """

    def __init__(
        self,
        context: WorkerContext,
        engine: VllmEngine,
        scheduler: VllmScheduler,
        reporter: Reporter,
        cached: CachedBlocks | None = None,
    ) -> None:
        """cached: the index of vLLM's prefix cache, which the loop keeps up to date."""
        self._context = context
        self._engine = engine
        self._scheduler = scheduler
        self._reporter = reporter
        self._cached = cached
        self.idle = True
        # True if anything happened since this was last set to False.
        self.changed = True

    async def run(self) -> None:
        """Runs steps until cancelled."""
        while True:
            await self.step()

    async def step(self) -> None:
        """Runs and reports one step, or waits for work."""
        context, scheduler = self._context, self._scheduler
        context.work.clear()
        began = context.clock.now()
        self._reporter.keep_house(began)
        self.idle = not scheduler.has_work
        if self.idle:
            await context.work.wait()
            self.changed = True
            return
        self.changed = True
        tokens = max(1, scheduler.tokens())
        starts, aborts = scheduler.next()
        if not (starts or aborts or scheduler.runs):
            # All prompts wait for staging blocks, which a push will release.
            scheduler.abandon()
            await context.work.wait()
            return
        try:
            result = await context.engine.timed(tokens, partial(self._engine.step, starts, aborts))
        except Exception as error:
            log.exception("vllm_step_failed", worker=context.identity.worker_id, reason=str(error))
            raise
        now = context.clock.now()
        if self._cached is not None:
            self._cached.apply(result.cache)
        batch, sampled, failures = scheduler.complete(result, began)
        scheduler.ran(now - began, now)
        for work, failure in failures:
            self._reporter.report_failure(work, failure)
        self._reporter.report(batch, sampled)
        if not batch and not failures:
            await asyncio.sleep(_PAUSE_S)
