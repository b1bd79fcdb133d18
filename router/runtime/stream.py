"""The stream of one answer: tokens become text and wait until the client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from typing import Protocol

from kvrelay.clock import Clock
from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Ledger, Path, PromptLogprobs, TokenLogprobs, Usage
from kvrelay.types.thinking import ThinkingPlace
from kvrelay.wire.inference import GenerateResponse
from router.core.effects import Emit, End
from router.core.lifecycle import Lifecycle
from router.core.path_policy import Assignment
from router.runtime.write_scheduler import WriteScheduler


class TokenSink(Protocol):
    """Detokenizes one answer. Holds back text that may be part of a character or of a stop
    string.
    """

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached."""
        ...

    def push(self, token_id: int) -> str:
        """Adds a token and returns the new text, which may be empty."""
        ...

    def finish(self) -> str:
        """Returns the text that is still held back."""
        ...


# Tokens with logprobs that a response has at most. Their JSON takes a kilobyte and more for each.
_SCORED_AT_ONCE = 64


def _nobody() -> None:
    """Stands for a reader that is not there yet."""


class Stream:
    """One answer. The tokens that the client has not read yet form a single growing response.

    So a slow client gets fewer and larger responses. It never delays the workers or holds more
    memory than its answer's max_tokens.
    """

    def __init__(
        self, life: Lifecycle, text: TokenSink, clock: Clock, write_scheduler: WriteScheduler
    ) -> None:
        """`text` has consumed the tokens that the client already has."""
        self.request = life.request
        self.path: Path | None = None
        self.ended: End | None = None
        self.ended_at = 0.0
        # Time of the last tokens.
        self.token_at: float | None = None
        self.first_handed_at: float | None = None
        self.num_tokens = len(life.request.resume)
        self._thinking: ThinkingPlace | None = None
        if life.request.thinking is not None:
            self._thinking = ThinkingPlace.at_start(life.request.thinking)
            self._count_thinking(life.request.resume)
        self._life = life
        self._text = text
        self._clock = clock
        # Tokens that wait, after the first `_taken` of the list.
        self._token_ids: list[int] = []
        self._taken = 0
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        # Until they are taken.
        self._prompt_logprobs: PromptLogprobs | None = None
        # Wakes this stream's writer.
        self.write_scheduler = write_scheduler
        # Called when there is something to take.
        self.on_news: Callable[[], None] = _nobody
        self._begun = asyncio.Event()
        self._fingerprint_told = False

    def push(self, emit: Emit, now: float) -> bool:
        """Adds tokens. Returns False once the text has reached a stop string."""
        text = self._text
        if text.stopped:
            return False
        self.path = emit.path
        before = len(self._token_ids)
        for token_id in emit.token_ids:
            self._token_ids.append(token_id)
            self._pieces.append(text.push(token_id))
            if text.stopped:
                break
        count = len(self._token_ids) - before
        self.num_tokens += count
        if self._thinking is not None and not self._thinking.over:
            self._count_thinking(self._token_ids[before:])
        if emit.prompt_logprobs is not None:
            self._prompt_logprobs = emit.prompt_logprobs
        if emit.logprobs:
            self._logprobs += emit.logprobs[:count]
        if self.token_at is None:
            self._begun.set()
        self.token_at = now
        self.on_news()
        return not text.stopped

    def end(self, end: End, now: float) -> None:
        """Records the end of the request. It must be called once."""
        assert self.ended is None, f"{self.request.request_id} ended twice"
        if end.error is None:
            self._pieces.append(self._text.finish())
            # The last allowed token may complete a stop string, which workers do not detect.
            if self._text.stopped:
                end = replace(end, finish_reason="stop")
        self.ended = end
        self.ended_at = now
        self._begun.set()
        self.on_news()
        # The reader refers to this stream. The cycle would keep both until a garbage collection.
        self.on_news = _nobody

    async def begun(self) -> None:
        """Waits until there is a token or the end. Raises the error of a request that ended without
        a token.
        """
        await self._begun.wait()
        if self.token_at is None and self.ended is not None and self.ended.error is not None:
            raise to_raise(self.ended.error)

    @property
    def has_news(self) -> bool:
        """Whether there are tokens to take, or the end."""
        return bool(self._token_ids) or self.ended is not None

    @property
    def is_partly_taken(self) -> bool:
        """Whether the last response left tokens for the next response."""
        return self._taken > 0

    @property
    def life(self) -> Lifecycle:
        """The request's state machine, read-only for callers: only the driver feeds it events."""
        return self._life

    def ledger(self) -> Ledger:
        """Returns the request's ledger up to now. The end time is valid only after the end."""
        life = self._life
        return life.timeline.ledger(
            self.first_handed_at, self.ended_at, life.handoff, tuple(life.attempts)
        )

    def _count_thinking(self, token_ids: Iterable[int]) -> None:
        assert self.request.thinking is not None
        assert self._thinking is not None
        for token_id in token_ids:
            self._thinking = self._thinking.after(token_id, self.request.thinking)

    @property
    def fetched_tokens(self) -> int:
        """Cached tokens that came from another worker's prefix cache."""
        return self._life.fetched_tokens

    def usage(self) -> Usage:
        """Returns the request's token counts so far."""
        thought = 0 if self._thinking is None else self._thinking.thought
        prompt = len(self.request.token_ids)
        return Usage(prompt, self._life.cached_tokens, self.num_tokens, thought)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached."""
        return self._text.stop_string

    @property
    def assignment(self) -> Assignment | None:
        """Assignment of the last attempt, or None before the first."""
        return self._life.last_assignment

    def take(self) -> GenerateResponse | None:
        """Returns the tokens that have not been taken, as one response; with logprobs, the first of
        these tokens. It has a finish_reason if the answer is complete. None after the tokens of an
        answer that an error ended.
        """
        end = self.ended
        if not self._token_ids and end is not None and end.error is not None:
            return None
        if self.first_handed_at is None and self._token_ids:
            self.first_handed_at = self._clock.now()
        index = self.num_tokens - len(self._token_ids) + self._taken
        token_ids, pieces, logprobs = self._next_tokens()
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if end is not None and (end.error is not None or self.is_partly_taken):
            end = None
        return GenerateResponse(
            request_id=self.request.client_id,
            index=index,
            token_ids=tuple(token_ids),
            text="".join(pieces),
            logprobs=tuple(logprobs),
            finish_reason=end.finish_reason if end else None,
            usage=self.usage() if end else None,
            path=self._life.path if end else None,
            why=self.assignment.why_for(self.request.tenant) if end and self.assignment else "",
            ledger=self.ledger() if end else None,
            system_fingerprint=self._fingerprint(end is not None),
            prompt_logprobs=prompt_logprobs,
        )

    def drop(self) -> None:
        """Drops the tokens that have not been taken, because the client does not read them."""
        self._token_ids, self._pieces, self._logprobs, self._taken = [], [], [], 0

    def _next_tokens(self) -> tuple[list[int], list[str], list[TokenLogprobs]]:
        """Returns the token ids, pieces of text and logprobs of the next response."""
        start, stop = self._taken, self._taken + _SCORED_AT_ONCE
        if self._logprobs and stop < len(self._token_ids):
            self._taken = stop
            part = slice(start, stop)
            return self._token_ids[part], self._pieces[part], self._logprobs[part]
        waiting = self._token_ids, self._pieces, self._logprobs
        self._token_ids, self._pieces, self._logprobs = [], [], []
        self._taken = 0
        if start == 0:
            return waiting
        token_ids, pieces, logprobs = waiting
        return token_ids[start:], pieces[start:], logprobs[start:]

    def _fingerprint(self, last: bool) -> str:
        """Returns the fingerprint of the model version, for the first response that knows it and
        for the last response.
        """
        model = self._life.model
        if model is None or (self._fingerprint_told and not last):
            return ""
        self._fingerprint_told = True
        return replace(model, adapter=self._life.request.adapter).fingerprint


def to_raise(error: KvRelayError) -> KvRelayError:
    """Returns a copy of the error that ended a stream. Raising the error itself would give it a
    traceback, which refers to the frames of the reader, and these refer to the stream.
    """
    return copy(error)
