"""The streams of answers to one HTTP request. Each of its prompts has `n` choices."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice

from kvrelay.errors import (
    Internal,
    InvalidArgument,
    KvRelayError,
    NotFound,
    ResourceExhausted,
)
from kvrelay.tenants import Tenant
from kvrelay.types.requests import Path, PromptLogprobs, TokenLogprobs, Usage
from kvrelay.wire.inference import GenerateRequest, GenerateResponse
from router.api.http.completion import Completion
from router.api.http.logprobs import LogprobsText, chat_logprobs, completion_logprobs
from router.api.http.structured_output import with_tool_names
from router.frontend.frontend import Frontend
from router.frontend.validation import DEFAULT_MAX_TOKENS
from router.runtime.stream import Stream
from router.runtime.stream_reader import StreamReader

# Limit on the logprobs of one request.
MAX_SCORES = 2**21
# Tokens of a prompt whose logprobs are encoded without a pause.
_SCORED_AT_ONCE = 64


class Choices:
    """The choices of one HTTP request: their streams, and their texts and logprobs in OpenAI's
    shape.
    """

    def __init__(
        self, frontend: Frontend, completion: Completion, streams: Sequence[Stream]
    ) -> None:
        self._frontend = frontend
        # An answer may take minutes, and only `echo` needs the prompt again.
        self.completion = completion if completion.echo else completion.without_prompts()
        self.streams = streams
        self._offsets = [
            frontend.text.open_offsets(one.request.token_ids)
            for one in streams
            if completion.requests[0].sampling.logprobs is not None and not completion.chat
        ]
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        # By prompt, if the answers echo them.
        self._prompts: list[str] = []

    @classmethod
    async def open(
        cls,
        frontend: Frontend,
        completion: Completion,
        tenant: Tenant,
        arrival: float,
        traceparent: str = "",
    ) -> Choices:
        """Admits all choices of the request. On an error, cancels the admitted choices.

        Raises the first error of Frontend.tokenize or Frontend.admit, InvalidArgument for too many
        logprobs, and NotFound if the request needs texts and the model has no tokenizer.
        """
        streams: list[Stream] = []
        try:
            _check_texts(frontend, completion)
            _check_scores(completion)
            token_ids: tuple[int, ...] = ()
            for number, request in enumerate(completion.requests):
                # The first choice of a prompt.
                if number % completion.n == 0:
                    # The check applies to the client's id. The choices' ids are longer.
                    named = replace(request, request_id=completion.request_id)
                    token_ids = await frontend.tokenize(
                        named, tenant, completion.n, completion.chat_options
                    )
                if streams:
                    # Each admission hashes the blocks of its prompt, which may be long.
                    await asyncio.sleep(0)
                if completion.cut_to_context:
                    request = _cut(request, frontend.max_model_len - len(token_ids))
                markers = completion.chat_options.markers
                streams.append(
                    await frontend.admit(
                        request, token_ids, tenant, arrival, None, traceparent, markers
                    )
                )
            return cls(frontend, completion, streams)
        except BaseException as error:
            for stream in streams:
                frontend.cancel(stream)
            if isinstance(error, ResourceExhausted) and streams:
                error.message = (
                    f"choice {len(streams) + 1} of {len(completion.requests)}: {error.message}, or "
                    "ask for fewer choices"
                )
            if isinstance(error, KvRelayError):
                several = len(completion.requests) > completion.n
                prompt = f"prompt[{len(streams) // completion.n}]" if several else "prompt"
                _name_as_sent(error, completion, prompt)
            raise

    def __len__(self) -> int:
        return len(self.streams)

    async def echoes(self) -> list[str]:
        """Returns the text of the prompt for each choice."""
        n = self.completion.n
        self._prompts = [
            one.prompt
            if one.prompt is not None
            else await self._frontend.text.decode(one.token_ids, self.streams[0].request.tenant)
            for one in self.completion.requests[::n]
        ]
        return [text for text in self._prompts for _ in range(n)]

    def usage(self, index: int, response: GenerateResponse) -> Usage:
        """Returns the usage of the choice `index` up to and including this response."""
        return replace(
            self.streams[index].usage(), completion_tokens=response.index + len(response.token_ids)
        )

    @property
    def path(self) -> Path | None:
        """Path of the first choice, or None while it is not assigned."""
        return self.streams[0].path

    def cancel(self) -> None:
        """Cancels all choices."""
        for stream in self.streams:
            self._frontend.cancel(stream)

    async def begun(self) -> None:
        """Waits until the first choice has a token. Raises its error if it ends without a token."""
        with self._late_errors():
            await self.streams[0].begun()

    async def whole(
        self, hear: Callable[[int, GenerateResponse], None]
    ) -> tuple[list[GenerateResponse], list[LogprobsText | None]]:
        """Passes each response to `hear`, with the index of its choice. Returns the last response
        of each choice, with the token ids of all, and the logprobs as JSON.
        """
        answers = [_Answer() for _ in self.streams]
        scores: list[LogprobsText | None] = [None] * len(self.streams)
        async for index, response, logprobs in self.responses():
            answers[index].add(response)
            hear(index, response)
            if logprobs is not None:
                # Logprobs are encoded as they arrive. Encoding those of a long answer at once would
                # block the event loop.
                written = scores[index] = scores[index] or LogprobsText()
                written.take(logprobs)
        return [one.response() for one in answers], scores

    async def responses(
        self,
    ) -> AsyncGenerator[tuple[int, GenerateResponse, LogprobsText | None], None]:
        """Yields (index of the choice, response, logprobs in OpenAI's shape). Raises the first
        error of any choice.
        """
        with self._late_errors():
            async for index, response in StreamReader(self.streams).responses():
                logprobs = await self._logprobs(index, response) if response.logprobs else None
                yield index, response, logprobs

    @contextmanager
    def _late_errors(self) -> Iterator[None]:
        """Names the field in the errors of workers, which refuse late only what a grammar does."""
        try:
            yield
        except InvalidArgument as error:
            if error.field is None and "guidance" in error.message.partition(":")[0]:
                error.field = "guidance"
            _name_as_sent(error, self.completion, "prompt")
            raise

    async def _logprobs(self, index: int, response: GenerateResponse) -> LogprobsText:
        written = LogprobsText()
        if response.prompt_logprobs is not None:
            await self._add_prompt(written, index, response.prompt_logprobs)
        self._read(response.token_ids, response.logprobs)
        if self.completion.chat:
            written.add(
                chat_logprobs(response.token_ids, self._texts, self._bytes, response.logprobs)
            )
            return written
        begin = len(self._prompts[index // self.completion.n]) if self._prompts else 0
        offsets = [begin + self._offsets[index].push(one) for one in response.token_ids]
        scores = response.logprobs
        written.add(completion_logprobs(response.token_ids, self._texts, scores, offsets))
        return written

    async def _add_prompt(
        self, written: LogprobsText, index: int, logprobs: PromptLogprobs
    ) -> None:
        """Adds the logprobs of a prompt, part by part: a prompt may have many thousands."""
        token_ids = self.streams[index].request.token_ids
        if len(logprobs) != len(token_ids) - 1:
            raise Internal(
                f"a worker sent {len(logprobs)} logprobs for a prompt of {len(token_ids)} tokens"
            )
        places = self._frontend.text.open_offsets(())
        scores: Iterator[TokenLogprobs | None] = chain((None,), logprobs)
        for start in range(0, len(token_ids), _SCORED_AT_ONCE):
            part = token_ids[start : start + _SCORED_AT_ONCE]
            own = list(islice(scores, len(part)))
            self._read(part, [one for one in own if one is not None])
            written.add(completion_logprobs(part, self._texts, own, list(map(places.push, part))))
            await asyncio.sleep(0)

    def _read(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Decodes the tokens that have not been decoded before, each by itself. Special tokens have
        their names, so that they can be told apart.
        """
        wanted = {*token_ids, *(token_id for one in logprobs for token_id, _ in one.top)}
        for token_id in wanted - self._texts.keys():
            self._texts[token_id] = self._frontend.text.with_special_tokens([token_id])
            if self.completion.chat:
                self._bytes[token_id] = self._frontend.text.bytes_of(token_id)


def _cut(request: GenerateRequest, room: int) -> GenerateRequest:
    """Returns the request with at most `room` tokens of answer."""
    most = request.sampling.max_tokens
    if most is None or not 0 < room < most:
        return request
    return replace(request, sampling=replace(request.sampling, max_tokens=room))


class _Answer:
    """Collects the tokens of one choice in little memory: a response may have a single token."""

    def __init__(self) -> None:
        self._index = 0
        self._token_ids = array("q")
        self._last: GenerateResponse | None = None

    def add(self, response: GenerateResponse) -> None:
        if self._last is None:
            self._index = response.index
        self._token_ids.extend(response.token_ids)
        self._last = response

    def response(self) -> GenerateResponse:
        """Returns the last response, with all tokens and without its text."""
        assert self._last is not None, "a stream ends with a response"
        token_ids = tuple(self._token_ids)
        return replace(self._last, index=self._index, token_ids=token_ids, text="", logprobs=())


def _check_scores(completion: Completion) -> None:
    """Checks the number of logprobs, because those of all choices stay in memory until the client
    reads them. Raises InvalidArgument.
    """
    options = completion.requests[0].sampling
    if options.logprobs is None:
        return
    tokens = DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens
    scores = len(completion.requests) * tokens * (1 + options.logprobs)
    if scores > MAX_SCORES:
        raise InvalidArgument(
            f"{len(completion.requests)} choices of {tokens} tokens with {options.logprobs} "
            f"logprobs each give {scores} values; allowed are {MAX_SCORES} in one request, so "
            "reduce n, max_tokens or logprobs",
            field="logprobs",
        )


def _check_texts(frontend: Frontend, completion: Completion) -> None:
    """Checks that the model has a tokenizer if the request needs one, before any choice runs.
    Raises NotFound.
    """
    wanted = {
        "echo": completion.echo,
        "logprobs": completion.requests[0].sampling.logprobs is not None,
    }
    for field, given in wanted.items():
        if given and not frontend.text.has_tokenizer:
            raise NotFound(
                f"this model has no tokenizer to decode tokens; leave {field} out", field=field
            )


def _name_as_sent(error: KvRelayError, completion: Completion, prompt: str) -> None:
    """Replaces kvrelay's names of fields by those of the HTTP request. Text after a colon or in
    quotes may be the client's own.
    """
    if error.field == "guidance" and completion.tool_use is not None:
        error.message = with_tool_names(error.message, completion.tool_use)
    names = {"token_ids": prompt, **completion.names}
    names = {name: sent for name, sent in names.items() if sent}
    # Inside of a message, these may be words.
    inside = "|".join(name for name in names if name not in ("stop", "messages"))
    begin = "|".join(names)
    error.message = re.sub(
        rf"(?<!\w)'(?:\\.|[^'\\])*'|\"[^\"]*\"|: .*|^(?:{begin})\b|\b(?:{inside})\b",
        lambda one: names.get(one[0], one[0]),
        error.message,
        flags=re.DOTALL,
    )
    if error.field is not None:
        error.field = names.get(error.field, error.field).partition("[")[0]
