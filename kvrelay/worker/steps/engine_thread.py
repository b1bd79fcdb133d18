"""The thread that runs the model, and the watch over its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvrelay.clock import Clock
from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.parallel.rank_lost import RankLost
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.faults import SegmentsFailed
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sequence_segment import Segment
from kvrelay.process.telemetry import get_logger
from kvrelay.worker.steps.busy_share import BusyTime
from kvrelay.worker.steps.step_cost import StepCost
from kvrelay.worker.steps.step_watch import POLL_S, StepHung, StepWatch
from kvrelay.worker.steps.warmup import WARMUP_STEPS, warmup_segment

log = get_logger(__name__)


class EngineThread:
    """Runs the steps of one model in a thread of their own, so that the event loop stays free."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.watch = StepWatch()
        self.busy = BusyTime(clock.now())
        self.cost = StepCost(clock.now())
        # True once real steps have run.
        self.proven = False
        self.hung = False

    async def call(self, function: Callable[[], None]) -> None:
        """Calls a function in the thread, for example to bind it to a core."""
        await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def warm_up(self) -> None:
        """Runs the warm-up steps before user requests. The first compiles kernels and allocates
        memory, so that no request waits for that; the second measures the time of a step.
        """
        if self._runner.warmup is None:
            for _ in range(WARMUP_STEPS):
                try:
                    await self.run([warmup_segment(self._runner)])
                except SegmentsFailed as failed:
                    log.warning("warmup_step_failed", reason=str(failed))
        else:
            self.watch.proven(*self._runner.warmup)
        self.proven = True

    async def run(
        self, segments: list[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        """Runs a step under the watch. Raises what `ModelRunner.run` raises."""
        began = self._clock.now()
        tokens = sum(len(segment.token_ids) for segment in segments)
        self.watch.began(tokens, began)
        self.busy.began(began)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._runner.run, segments, on_layer
            )
        except RankLost:
            # `hang` reports the lost rank, and this task is cancelled.
            await asyncio.Event().wait()
            raise
        finally:
            now = self._clock.now()
            self.watch.ended(now)
            self.busy.ended(now)
            if self.proven:
                # The warm-up steps compile kernels.
                self.cost.ended(tokens, now - began, now)

    async def hang(self) -> None:
        """Waits until a step hangs or the engine loses a rank. Always raises: StepHung or
        RankLost.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if reason := self._runner.lost():
                self.hung = True
                raise RankLost(reason)
            if self.watch.poll(self._clock.now()):
                break
        self.hung = True
        raise StepHung(
            f"a step of {self.watch.tokens} tokens has run for {self.watch.age_s:.1f} s; steps "
            f"of that size end within {self.watch.bound_s:.1f} s"
        )

    def shutdown(self) -> None:
        """Ends the thread, after its running step. A hung thread is left behind."""
        self._thread.shutdown(wait=not self.hung)
