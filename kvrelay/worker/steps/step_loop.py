"""The main loop of a worker: schedule, run, report."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol, cast

from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.sampling.sampler import Sampled, SampleRequest
from kvrelay.engine.sampling.sequence_faults import SegmentsFailed
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.scheduler import Scheduler
from kvrelay.worker.sequence import Work
from kvrelay.worker.steps.bisection import run_apart
from kvrelay.worker.steps.engine_thread import EngineThread

log = get_logger(__name__)

Outcome = list[Sampled] | Exception
"""What a step sampled for one sequence, or why it gave that sequence nothing."""


class Reporter(Protocol):
    """Receives the results of every step, on the event loop."""

    def keep_house(self, now: float) -> None:
        """Called before each step is scheduled, so that the step leaves out sequences past their
        deadline.
        """
        ...

    def stored(self, batch: list[Work], layers: int) -> None:
        """The first `layers` layers have stored the KV of the running step."""
        ...

    def report_failure(self, work: Work, error: Exception) -> None:
        """The step failed for this sequence alone. The sequence is still part of the step."""
        ...

    def report(self, batch: list[Work], sampled: SequenceOf[SequenceOf[Sampled]]) -> None:
        """Called after each step with the sampled tokens of each piece of work."""
        ...


class Steps(Protocol):
    """The loop that runs an engine's steps."""

    # True while nothing can run.
    idle: bool
    # True if anything happened since this was last set to False.
    changed: bool

    async def run(self) -> None:
        """Runs steps until cancelled."""
        ...


class StepLoop:
    """Runs steps while there is work.

    All accounting stays on the event loop, and only the model runs in the engine thread. So the
    loop needs no lock, and a new request is accepted while a step computes.
    """

    def __init__(
        self,
        context: WorkerContext,
        scheduler: Scheduler,
        reporter: Reporter,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """prepare: awaited before each step is scheduled, as part of the step's time."""
        self._prepare = prepare
        self._context = context
        self._scheduler = scheduler
        self._reporter = reporter
        self.idle = True
        # True if anything happened since this was last set to False.
        self.changed = True
        self._last_error = ""

    async def run(self) -> None:
        """Runs steps until cancelled."""
        while True:
            await self.step()

    async def step(self) -> None:
        """Schedules, runs and reports one step, or waits for work."""
        began = self._context.clock.now()
        if self._prepare is not None:
            await self._prepare()
        batch = self._schedule()
        self.idle = not batch
        if not batch:
            await self._context.work.wait()
            self.changed = True
            return
        self.changed = True
        outcomes = await self._outcomes(batch)
        now = self._context.clock.now()
        self._scheduler.ran(batch, now - began, now)
        self._report(batch, outcomes)

    def _schedule(self) -> list[Work]:
        self._context.work.clear()
        now = self._context.clock.now()
        self._reporter.keep_house(now)
        return self._scheduler.next(now)

    async def _outcomes(self, batch: list[Work]) -> SequenceOf[Outcome]:
        """Runs a step. If the step raises, the parts of its batch run again."""
        loop = asyncio.get_running_loop()

        def on_layer(index: int) -> None:
            loop.call_soon_threadsafe(self._reporter.stored, batch, index + 1)

        try:
            return await self._run(batch, on_layer)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is about this step
            self._log_failed_step(batch, error)
            # The frames of the traceback hold what the step computed. The next runs may need that
            # memory.
            raised = error.with_traceback(None)
        found = await run_apart(batch, raised, self._run)
        return [found[work] for work in batch]

    async def _run(
        self, batch: SequenceOf[Work], on_layer: OnLayer | None = None
    ) -> SequenceOf[Outcome]:
        """Runs a batch. Raises the error of the step as a whole.

        A repeated run has no `on_layer`: the layers store the same KV as before, and it may already
        be on its way.
        """
        try:
            # This loop is the native engine's.
            engine = cast(EngineThread, self._context.engine)
            return await engine.run([self._segment(work) for work in batch], on_layer)
        except SegmentsFailed as failed:
            return failed.outcomes

    def _report(self, batch: list[Work], outcomes: SequenceOf[Outcome]) -> None:
        # The order matters: a failed sequence withdraws its blocks before `complete` releases them,
        # so that no request finds KV that was not computed.
        sampled: list[SequenceOf[Sampled]] = []
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                _log_failed_sequence(work, outcome)
                self._reporter.report_failure(work, outcome)
            sampled.append([] if isinstance(outcome, Exception) else outcome)
        self._scheduler.complete(batch)
        self._reporter.report(batch, sampled)

    def _log_failed_step(self, batch: SequenceOf[Work], error: Exception) -> None:
        """Logs a failed step, with its traceback unless the last error was the same, since a fault
        may recur with each step.
        """
        known, self._last_error = self._last_error == repr(error), repr(error)
        requests = [work.sequence.spec.request_id for work in batch]
        log.error(
            "step_failed", requests=requests, reason=repr(error), exc_info=None if known else error
        )

    def _segment(self, work: Work) -> Segment:
        sequence = work.sequence
        start, end = sequence.num_computed, sequence.num_computed + work.num_tokens
        draft = array("q", work.draft)
        if sequence.queries is not None:
            sequence.queries.begin(start)
        sample = None
        if work.sample:
            sample = SampleRequest(
                params=sequence.spec.sampling,
                token_ids=sequence.tokens + draft if draft else sequence.tokens,
                prompt_len=sequence.spec.prompt_len,
                eos_token_ids=self._context.runner.eos_token_ids,
                matcher=sequence.matcher,
                thinking=sequence.thinking,
            )
        return Segment(
            token_ids=sequence.tokens[start:end] + draft,
            start=start,
            blocks=sequence.blocks,
            sample=sample,
            num_draft=len(draft),
            scores=sequence.scores,
            adapter=sequence.spec.adapter,
            dropped=sequence.num_dropped,
            queries=sequence.queries,
        )


def _log_failed_sequence(work: Work, error: Exception) -> None:
    log.warning(
        "sequence_failed",
        request=work.sequence.spec.request_id,
        tokens=len(work.sequence.tokens),
        reason=str(error) if isinstance(error, KvRelayError) else repr(error),
    )
