"""The main loop of a worker on vLLM: vLLM schedules and runs, the worker reports."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from kvrelay.process.telemetry import get_logger
from kvrelay.vllm_engine.cached_blocks import CachedBlocks
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.scheduler import VllmScheduler
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.steps.step_loop import Reporter

# Seconds between steps that compute nothing, because vLLM waits for blocks, or for a read of KV by
# this or another worker. A long wait has longer pauses, so that they add at most a quarter to it.
_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05

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
        # Monotonic seconds since which steps compute nothing.
        self._waits_since: float | None = None
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
        self.idle = not (scheduler.has_work or self._engine.is_unsettled)
        if self.idle:
            await context.work.wait()
            self.changed = True
            return
        self.changed = True
        tokens = max(1, scheduler.tokens())
        starts, aborts = scheduler.next()
        if not (starts or aborts or scheduler.runs or self._engine.is_unsettled):
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
        if batch or failures:
            self._waits_since = None
        else:
            await self._pause(now)

    async def _pause(self, now: float) -> None:
        """Waits until the next step may compute something, or until there is other work."""
        if self._waits_since is None:
            self._waits_since = now
        pause = min(max(_PAUSE_S, (now - self._waits_since) / 4), _LONGEST_PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._context.work.wait()
