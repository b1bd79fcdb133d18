"""One answer, assembled from its responses. Pure: no I/O, and time is an argument."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvrelay.errors import DataLoss
from kvrelay.types.requests import (
    FinishReason,
    Ledger,
    Path,
    PromptLogprobs,
    TokenLogprobs,
    Usage,
)
from kvrelay.wire.inference import GenerateRequest, GenerateResponse


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `ttft_seconds` and `e2e_seconds` are measured by the client, the ledger by
    the router.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    path: Path | None
    why: str
    ledger: Ledger | None
    # Seconds from the first call to the first token; None for an answer without tokens.
    ttft_seconds: float | None
    # Seconds from the first call to the last token.
    e2e_seconds: float
    # 1, plus one for each failed call after which another call continued the answer.
    calls: int
    # Fingerprint of the model that gave the answer; empty if the router does not send it.
    system_fingerprint: str = ""
    # Of the prompt's tokens from the second one on, if the request asked for them.
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. `logprobs` is set if the request asked for it."""

    # Position in the answer, from 0.
    index: int
    token_id: int
    logprobs: TokenLogprobs | None


def tokens_of(response: GenerateResponse) -> Iterator[Token]:
    """Yields the tokens of a response, one by one."""
    for offset, token_id in enumerate(response.token_ids):
        yield Token(
            response.index + offset,
            token_id,
            response.logprobs[offset] if response.logprobs else None,
        )


class Answer:
    """Collects responses over any number of calls. Drops repeated responses and raises DataLoss for
    a gap.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        # Time of the first call.
        self._started: float | None = None
        self._first_token_at: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._last: GenerateResponse | None = None
        self._ended = 0.0
        self._fingerprint = request.system_fingerprint

    @property
    def finished(self) -> bool:
        """Whether the last response has arrived."""
        return self._last is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return len(self._token_ids)

    def begin(self, now: float) -> None:
        """Notes that a call begins. The times of the answer count from the first call."""
        if self._started is None:
            self._started = now

    def request(self) -> GenerateRequest:
        """Returns the request of the next call: the rest of the answer."""
        return replace(
            self._request,
            resume=self._request.resume + tuple(self._token_ids),
            system_fingerprint=self._fingerprint,
        )

    def receive(self, response: GenerateResponse, now: float) -> bool:
        """Adds a response. Returns False if the response repeats tokens that have arrived already.

        Raises DataLoss if tokens before the response or logprobs of its tokens are missing, or if
        the response repeats only some of its tokens, because its text cannot be cut. The caller
        must then request the rest of the answer again.
        """
        if response.logprobs and len(response.logprobs) != len(response.token_ids):
            raise DataLoss(
                f"received {len(response.token_ids)} tokens with the logprobs of "
                f"{len(response.logprobs)}"
            )
        have = len(self._request.resume) + len(self._token_ids)
        end = response.index + len(response.token_ids)
        if end <= have and response.index < have and response.finish_reason is None:
            return False
        if response.index != have:
            raise DataLoss(
                f"received tokens {response.index} to {end}, and expected token {have} first"
            )
        if response.token_ids and self._first_token_at is None:
            self._first_token_at = now
        self._fingerprint = response.system_fingerprint or self._fingerprint
        self._token_ids += response.token_ids
        self._logprobs += response.logprobs
        if response.prompt_logprobs is not None:
            self._prompt_logprobs = response.prompt_logprobs
        self._text.append(response.text)
        if response.finish_reason is not None:
            self._last, self._ended = response, now
        return True

    def completion(self, calls: int) -> Completion:
        """Returns the finished answer. `calls` is the number of calls that it took. Asserts
        `finished`.
        """
        last = self._last
        assert last is not None, "the answer is not finished"
        assert last.finish_reason is not None
        assert self._started is not None
        return Completion(
            request_id=last.request_id,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage or Usage(),
            path=last.path,
            why=last.why,
            ledger=last.ledger,
            ttft_seconds=None
            if self._first_token_at is None
            else self._first_token_at - self._started,
            e2e_seconds=self._ended - self._started,
            calls=calls,
            prompt_logprobs=self._prompt_logprobs,
            system_fingerprint=self._fingerprint,
        )
