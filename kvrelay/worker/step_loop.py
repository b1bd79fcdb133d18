"""The main loop of a worker: schedule, run, report."""

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

    def next(self, now: float) -> list[Work]:
        """The work of the next step; empty if there is none."""
        ...

    def complete(self, batch: list[Work]) -> None:
        """Takes in a finished step: advances its sequences and releases the blocks of ended
        ones.
        """
        ...


class Reporter(Protocol):
    """Receives the results of every step, on the event loop."""

    def keep_house(self, now: float) -> None:
        """Called before each step is scheduled, so that the step leaves out sequences past their
        deadline.
        """
        ...

    def report(self, batch: list[Work], sampled: SequenceOf[SequenceOf[Sampled]]) -> None:
        """Called after each step with the sampled tokens of each piece of work."""
        ...

    def report_failure(self, work: Work, error: Exception) -> None:
        """The step failed for this sequence alone. The sequence is still part of the step."""
        ...

    def stored(self, batch: list[Work], layers: int) -> None:
        """The first `layers` layers have stored the KV of the running step."""
        ...


class StepLoop:
    """Runs steps while there is work.

    All accounting stays on the event loop, and only the model runs in the engine thread. So the
    loop needs no lock, and a new request is accepted while a step computes.
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
        # True once real steps have run.
        self.proven = False
        # Set when the worker's state may have changed.
        self.news = asyncio.Event()
        self.hung = False
        self.idle = True
        self._last_error = ""
        # True if anything happened since this was last set to False.
        self.changed = True

    def wake(self) -> None:
        """Wakes the loop, since there may be work: a sequence arrived, or blocks were released."""
        self.changed = True
        self._work_came.set()

    async def run(self) -> None:
        """Runs the proving steps, then steps until cancelled."""
        try:
            await self._prove()
            while True:
                await self.step()
        finally:
            self._engine.shutdown(wait=not self.hung)

    async def hang(self) -> None:
        """Waits until a step hangs or the engine loses a rank. Always raises: StepHung or
        RankLost.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if why := self._runner.lost():
                self.hung = True
                raise RankLost(why)
            if self.watch.look(self._clock.now()):
                break
        self.hung = True
        raise StepHung(
            f"a step of {self.watch.tokens} tokens has run for {self.watch.age_s:.1f} s; steps "
            f"of that size end within {self.watch.bound_s:.1f} s"
        )

    async def in_engine_thread(self, call: Callable[[], None]) -> None:
        """Calls a function in the engine thread, for example to bind it to a core."""
        await asyncio.get_running_loop().run_in_executor(self._engine, call)

    async def _prove(self) -> None:
        """Runs the proving steps before user requests. The first compiles kernels and allocates
        memory, so that no request waits for that; the second measures the time of a step.
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
        """Runs the segments in the engine thread, under the step watch."""
        now = self._clock.now()
        self.watch.began(sum(len(segment.token_ids) for segment in segments), now)
        self.busy.began(now)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._engine, self._runner.run, segments, on_layer
            )
        except RankLost:
            # `hang` reports the lost rank, and this task is cancelled.
            await asyncio.Event().wait()
            raise
        finally:
            now = self._clock.now()
            self.watch.ended(now)
            self.busy.ended(now)

    async def step(self) -> None:
        """Schedules, runs and reports one step, or waits for work. If the step raises, the parts of
        its batch run again.
        """
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
            # The frames of the traceback hold what the step computed. The next runs may need that
            # memory.
            raised = error.with_traceback(None)
        if raised is not None:
            found = await run_apart(batch, raised, self._outcomes)
            outcomes = [found[work] for work in batch]
        # The order matters: a failed sequence withdraws its blocks before `complete` releases them,
        # so that no request finds KV that was not computed.
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
        """Runs a batch. Raises the error of the step as a whole.

        A repeated run has no `on_layer`: the layers store the same KV as before, and it may already
        be on its way.
        """
        try:
            return await self._run([self._segment(work) for work in batch], on_layer)
        except SegmentsFailed as failed:
            return failed.outcomes

    def _tell(self, batch: SequenceOf[Work], error: Exception) -> None:
        """Logs a failed step, with its traceback unless the last error was the same, since a fault
        may recur with each step.
        """
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
