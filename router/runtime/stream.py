"""One answer on its way to its client: tokens become text, and wait here until the client takes
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from kvrelay.clock import Clock
from kvrelay.types import Ledger, Path, TokenLogprobs, Usage
from kvrelay.wire.inference import GenerateResponse
from router.core.effects import Emit, End
from router.core.lifecycle import Lifecycle
from router.core.path_policy import Assignment
from router.runtime.write_scheduler import WriteScheduler


class TokenSink(Protocol):
    """Detokenizes one answer; holds back what may be part of a character or of a stop string."""

    @property
    def stopped(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Stream:
    """What came since the client last took something is kept as one response that grows.

    So a client that reads slowly gets fewer and larger responses, and never holds up the workers or
    more memory than its answer's max_tokens.
    """

    def __init__(
        self, life: Lifecycle, text: TokenSink, clock: Clock, write_scheduler: WriteScheduler
    ) -> None:
        """`text` has taken in the tokens that the client has already."""
        self.request = life.request
        self.path: Path | None = None
        self.ended: End | None = None
        self.ended_at = 0.0
        self.token_at: float | None = None  # when the last tokens came
        self.first_handed_at: float | None = None
        self.num_tokens = len(life.request.resume)
        self._life = life
        self._text = text
        self._clock = clock
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._write_scheduler = write_scheduler
        # `responses`, while it waits for something to send
        self._reader: asyncio.Future[None] | None = None
        self._begun = asyncio.Event()
        self._fingerprint_told = False

    def push(self, emit: Emit, now: float) -> bool:
        """Takes tokens in; False once the text has reached a stop string."""
        text = self._text
        if text.stopped:
            return False
        self.path = emit.path
        for offset, token_id in enumerate(emit.token_ids):
            self._token_ids.append(token_id)
            self._pieces.append(text.push(token_id))
            self._logprobs += emit.logprobs[offset : offset + 1]
            self.num_tokens += 1
            if text.stopped:
                break
        if self.token_at is None:
            self._begun.set()
        self.token_at = now
        self._wake_reader()
        return not text.stopped

    def end(self, end: End, now: float) -> None:
        assert self.ended is None, f"{self.request.request_id} ended twice"
        if end.error is None:
            self._pieces.append(self._text.finish())
            # By the last token that it was allowed, which the workers do not see
            if self._text.stopped:
                end = replace(end, finish_reason="stop")
        self.ended = end
        self.ended_at = now
        self._begun.set()
        self._wake_reader()

    async def begun(self) -> None:
        """Until there is a token, or the end. Raises the typed error that ended the request without
        one.
        """
        await self._begun.wait()
        if self.token_at is None and self.ended is not None and self.ended.error is not None:
            raise self.ended.error

    async def responses(self) -> AsyncIterator[GenerateResponse]:
        """Ends after the response that has a finish_reason, or raises the typed error that ended
        the request.
        """
        while True:
            turn = asyncio.get_running_loop().create_future()
            if self._token_ids or self.ended is not None:
                self._write_scheduler.queue(turn)
            else:
                self._reader = turn
            await turn
            # As it is now: tokens and an end may come while the client takes what is yielded
            end = self.ended
            if end is not None and end.error is None:
                yield self._take()
                return
            if self._token_ids:
                yield self._take()
            if end is not None and end.error is not None:
                raise end.error

    @property
    def life(self) -> Lifecycle:
        """To be read; its driver is the one that feeds it."""
        return self._life

    def ledger(self) -> Ledger:
        life = self._life
        return life.timeline.ledger(
            self.first_handed_at, self.ended_at, life.handoff, tuple(life.attempts)
        )

    @property
    def fetched_tokens(self) -> int:
        return self._life.fetched_tokens

    def usage(self) -> Usage:
        return Usage(len(self.request.token_ids), self._life.cached_tokens, self.num_tokens)

    @property
    def assignment(self) -> Assignment | None:
        """Of the last attempt."""
        return self._life.last_assignment

    def _wake_reader(self) -> None:
        if self._reader is not None:
            self._write_scheduler.queue(self._reader)
            self._reader = None

    def _take(self) -> GenerateResponse:
        if self.first_handed_at is None and self._token_ids:
            self.first_handed_at = self._clock.now()
        token_ids, pieces, logprobs = self._token_ids, self._pieces, self._logprobs
        self._token_ids, self._pieces, self._logprobs = [], [], []
        end = self.ended if self.ended is not None and self.ended.error is None else None
        return GenerateResponse(
            request_id=self.request.client_id,
            index=self.num_tokens - len(token_ids),
            token_ids=tuple(token_ids),
            text="".join(pieces),
            logprobs=tuple(logprobs),
            finish_reason=end.finish_reason if end else None,
            usage=self.usage() if end else None,
            path=self._life.path if end else None,
            why=self.assignment.why_for(self.request.tenant) if end and self.assignment else "",
            ledger=self.ledger() if end else None,
            system_fingerprint=self._fingerprint(end is not None),
        )

    def _fingerprint(self, last: bool) -> str:
        """Of the model that gives the answer, for the first response that can tell and for the
        last.
        """
        model = self._life.model
        if model is None or (self._fingerprint_told and not last):
            return ""
        self._fingerprint_told = True
        return model.fingerprint
