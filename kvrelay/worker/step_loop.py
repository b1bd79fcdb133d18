"""The heart of a worker: schedule, run, report."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvrelay.clock import Clock
from kvrelay.engine.ranks.lost import RankLost
from kvrelay.engine.runner import ModelRunner, Segment
from kvrelay.engine.sampling import Sampled, SampleRequest
from kvrelay.engine.step import OnLayer
from kvrelay.telemetry import get_logger
from kvrelay.types import SamplingParams
from kvrelay.worker.busy import BusyTime
from kvrelay.worker.sequence import Work
from kvrelay.worker.step_watch import LOOK_S, StepHung, StepWatch

log = get_logger(__name__)


class Scheduler(Protocol):
    """Chooses the work of the next step and takes in the finished one."""

    def next(self, now: float) -> list[Work]: ...

    def complete(self, batch: list[Work]) -> None: ...


class Reporter(Protocol):
    """Told of every step, on the event loop."""

    def keep_house(self, now: float) -> None:
        """A step is about to be scheduled: what time alone has ended need not be part of it."""
        ...

    def report(self, batch: list[Work], sampled: SequenceOf[SequenceOf[Sampled]]) -> None: ...

    def report_failure(self, batch: list[Work], error: Exception) -> None: ...

    def stored(self, batch: list[Work], layers: int) -> None:
        """So many of the model's layers have stored the KV of the step that runs."""
        ...


class StepLoop:
    """Runs steps for as long as there is work. All bookkeeping stays on the event loop; only the model runs in
    the engine thread, so nothing here needs a lock and a new request is taken in while a step computes.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, reporter: Reporter, clock: Clock) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._reporter = reporter
        self._clock = clock
        self._work_came = asyncio.Event()
        self._engine = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.watch = StepWatch()
        self.busy = BusyTime(clock.now())
        self.proven = False  # it has run real steps
        self.hung = False
        self.idle = True
        self.changed = True  # something happened since this was last set to False

    def wake(self) -> None:
        """There may be work to schedule: something arrived, or blocks came free."""
        self.changed = True
        self._work_came.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._prove()
            while True:
                await self.step()
        finally:
            self._engine.shutdown(wait=not self.hung)

    async def hang(self) -> None:
        """Until a step hangs or a rank of the engine is lost; says so with StepHung or RankLost."""
        while True:
            await asyncio.sleep(LOOK_S)
            if why := self._runner.lost():
                self.hung = True
                raise RankLost(why)
            if self.watch.look(self._clock.now()):
                break
        self.hung = True
        raise StepHung(
            f"a step of {self.watch.tokens} tokens has been running for {self.watch.age_s:.1f} s, and steps of that "
            f"size end within {self.watch.bound_s:.1f} s"
        )

    async def in_engine_thread(self, call: Callable[[], None]) -> None:
        """Runs what concerns the thread that computes, such as binding it to a core."""
        await asyncio.get_running_loop().run_in_executor(self._engine, call)

    async def _prove(self) -> None:
        """Steps before any user's. The first builds kernels and takes memory, which no user should wait for; the second
        tells how long a step takes.
        """
        tokens = [0] * self._runner.layout.block_size
        sample = SampleRequest(SamplingParams(seed=0), tokens, len(tokens))
        for _ in range(2):
            await self._run([Segment(tokens, start=0, blocks=[0], sample=sample)])
        self.proven = True

    async def _run(self, segments: list[Segment], on_layer: OnLayer | None = None) -> list[list[Sampled]]:
        """In the engine thread, and watched."""
        now = self._clock.now()
        self.watch.began(sum(len(segment.token_ids) for segment in segments), now)
        self.busy.began(now)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._engine, self._runner.run, segments, on_layer)
        except RankLost:
            await asyncio.Event().wait()  # `hang` tells of it, and this is cancelled
            raise
        finally:
            now = self._clock.now()
            self.watch.ended(now)
            self.busy.ended(now)

    async def step(self) -> None:
        self._work_came.clear()
        now = self._clock.now()
        self._reporter.keep_house(now)
        batch = self._scheduler.next(now)
        if not batch:
            self.idle = True
            await self._work_came.wait()
            return
        self.idle = False
        self.changed = True
        loop = asyncio.get_running_loop()

        def on_layer(index: int) -> None:
            loop.call_soon_threadsafe(self._reporter.stored, batch, index + 1)

        try:
            sampled = await self._run([self._segment(work) for work in batch], on_layer)
        except Exception as error:
            log.exception("step failed", requests=[work.sequence.spec.request_id for work in batch])
            # In this order: what has ended gives its blocks back, and nobody finds in them what was not computed.
            self._reporter.report_failure(batch, error)
            self._scheduler.complete(batch)
            return
        self._scheduler.complete(batch)
        self._reporter.report(batch, sampled)

    def _segment(self, work: Work) -> Segment:
        sequence = work.sequence
        start, end = sequence.num_computed, sequence.num_computed + work.num_tokens
        draft = array("q", work.draft)
        sample = None
        if work.sample:
            sample = SampleRequest(
                params=sequence.spec.sampling,
                token_ids=sequence.tokens + draft if draft else sequence.tokens,
                prompt_len=sequence.spec.prompt_len,
                eos_token_ids=self._runner.eos_token_ids,
            )
        return Segment(
            token_ids=sequence.tokens[start:end] + draft,
            start=start,
            blocks=sequence.blocks,
            sample=sample,
            num_draft=len(draft),
        )
