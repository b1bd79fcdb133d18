"""The heart of a worker: schedule, run, report."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvrelay.clock import Clock
from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.parallel.lost import RankLost
from kvrelay.engine.runner import ModelRunner, Segment
from kvrelay.engine.sampling.faults import SegmentsFailed
from kvrelay.engine.sampling.sampler import Sampled, SampleRequest
from kvrelay.errors import KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.worker.bisection import run_apart
from kvrelay.worker.busy import BusyTime
from kvrelay.worker.proof import PROVING_STEPS, proving_segment
from kvrelay.worker.sequence import Work
from kvrelay.worker.step_watch import LOOK_S, StepHung, StepWatch

log = get_logger(__name__)

Outcome = list[Sampled] | Exception
"""What a step sampled for one sequence, or why it gave that sequence nothing."""


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

    def report_failure(self, work: Work, error: Exception) -> None:
        """The step gave nothing to this sequence alone; it is still part of the step."""
        ...

    def stored(self, batch: list[Work], layers: int) -> None:
        """So many of the model's layers have stored the KV of the step that runs."""
        ...


class StepLoop:
    """Runs steps for as long as there is work. All bookkeeping stays on the event loop; only the
    model runs in the engine thread, so nothing here needs a lock and a new request is taken in
    while a step computes.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, reporter: Reporter, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._reporter = reporter
        self._clock = clock
        self._work_came = asyncio.Event()
        self._engine = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.watch = StepWatch()
        self.busy = BusyTime(clock.now())
        self.proven = False  # it has run real steps
        self.news = asyncio.Event()  # set when the worker's state may have changed
        self.hung = False
        self.idle = True
        self._last_error = ""
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
            f"a step of {self.watch.tokens} tokens has been running for {self.watch.age_s:.1f} s, "
            f"and steps of that size end within {self.watch.bound_s:.1f} s"
        )

    async def in_engine_thread(self, call: Callable[[], None]) -> None:
        """Runs what concerns the thread that computes, such as binding it to a core."""
        await asyncio.get_running_loop().run_in_executor(self._engine, call)

    async def _prove(self) -> None:
        """Steps before any user's. The first builds kernels and takes memory, which no user should
        wait for; the second tells how long a step takes.
        """
        if self._runner.proof is None:
            for _ in range(PROVING_STEPS):
                try:
                    await self._run([proving_segment(self._runner)])
                except SegmentsFailed as failed:
                    log.warning("proof_step_failed", reason=str(failed))
        else:
            self.watch.proven(*self._runner.proof)
        self.proven = True
        self.news.set()

    async def _run(
        self, segments: list[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        """In the engine thread, and watched."""
        now = self._clock.now()
        self.watch.began(sum(len(segment.token_ids) for segment in segments), now)
        self.busy.began(now)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._engine, self._runner.run, segments, on_layer
            )
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

        raised: Exception | None = None
        outcomes: SequenceOf[Outcome] = ()
        try:
            outcomes = await self._outcomes(batch, on_layer)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is about this step
            self._tell(batch, error)
            # Its frames hold what the step had computed, which the next runs may need the memory
            # of.
            raised = error.with_traceback(None)
        if raised is not None:
            found = await run_apart(batch, raised, self._outcomes)
            outcomes = [found[work] for work in batch]
        # In this order: what has ended gives its blocks back, and nobody finds in them what was not
        # computed.
        sampled: list[SequenceOf[Sampled]] = []
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._blame(work, outcome)
            sampled.append([] if isinstance(outcome, Exception) else outcome)
        self._scheduler.complete(batch)
        self._reporter.report(batch, sampled)

    async def _outcomes(
        self, batch: SequenceOf[Work], on_layer: OnLayer | None = None
    ) -> SequenceOf[Outcome]:
        """Raises what the step as a whole fails with. Without `on_layer` where it ran before: what
        a layer stored then is what it stores now, and may be on its way.
        """
        try:
            return await self._run([self._segment(work) for work in batch], on_layer)
        except SegmentsFailed as failed:
            return failed.outcomes

    def _tell(self, batch: SequenceOf[Work], error: Exception) -> None:
        """With its traceback, unless that is the last one's: a fault may come with each step."""
        known, self._last_error = self._last_error == repr(error), repr(error)
        requests = [work.sequence.spec.request_id for work in batch]
        log.error(
            "step_failed", requests=requests, reason=repr(error), exc_info=None if known else error
        )

    def _blame(self, work: Work, error: Exception) -> None:
        request_id = work.sequence.spec.request_id
        reason = str(error) if isinstance(error, KvRelayError) else repr(error)
        log.warning(
            "sequence_failed", request=request_id, tokens=len(work.sequence.tokens), reason=reason
        )
        self._reporter.report_failure(work, error)

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
