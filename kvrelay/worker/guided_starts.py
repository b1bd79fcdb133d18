"""Starts sequences with guidance, whose grammar is compiled first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.errors import Internal, KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.types.requests import SequenceSpec
from kvrelay.worker.served_model import ServedModel

Key = tuple[str, int]
Starter = Callable[[Matcher], None]

log = get_logger("worker.guided_starts")


class GuidedStarts:
    """Compiles guidance in a thread of its own, so that neither the event loop nor a step waits.

    The answer so far, of a sequence that continues one, is taken in there, too.
    """

    def __init__(self, runner: ServedModel) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guidance")
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def add(self, spec: SequenceSpec, start: Starter, fail: Callable[[KvRelayError], None]) -> None:
        """Calls `start` with the matcher of the sequence once its guidance is compiled, or `fail`
        if it is not accepted.
        """
        self._tasks[spec.key] = asyncio.create_task(self._run(spec, start, fail))

    def cancel(self, key: Key) -> None:
        """Forgets a sequence that has not started. Does nothing if there is none."""
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Forgets all sequences and ends the thread."""
        for key in list(self._tasks):
            self.cancel(key)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, spec: SequenceSpec, start: Starter, fail: Callable[[KvRelayError], None]
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(self._thread, self._open, spec)
            # From here on `cancel` is too late; the stage has the sequence.
            del self._tasks[spec.key]
            start(matcher)
        except KvRelayError as error:
            self._tasks.pop(spec.key, None)
            fail(error)

    def _open(self, spec: SequenceSpec) -> Matcher:
        assert spec.sampling.guidance is not None, "only sequences with guidance are added"
        try:
            return self._runner.grammars.open(
                spec.sampling.guidance,
                spec.token_ids,
                spec.prompt_len,
                spec.salt,
                spec.tenant,
                spec.sampling.max_tokens,
            )
        except KvRelayError:
            raise
        # A panic of llguidance is no Exception.
        except BaseException as error:
            log.exception("guidance_failed", request_id=spec.request_id)
            raise Internal(f"the guidance could not be compiled: {error!r:.200}") from error
