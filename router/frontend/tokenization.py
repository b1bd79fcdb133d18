"""Tokenization and detokenization for the router's model. Long texts run off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvrelay.config.model_sections import ToolFormatName
from kvrelay.errors import InvalidArgument, KvRelayError, NotFound
from kvrelay.process.telemetry import get_logger
from kvrelay.process.uninterrupted import to_its_end
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.tokenizer.tokenizer import TextStream, Tokenizer, TokenOffsets
from kvrelay.types.chat import WITHOUT_TOOLS, ChatMessage, ChatOptions
from kvrelay.types.requests import SamplingParams, ThinkingMarkers
from router.core.body_budget import BodyBudget
from router.frontend.answer_parsers.formats import TOOL_FORMATS, tool_format_of
from router.frontend.answer_parsers.reasoning import ReasoningMarkers, reasoning_markers_of
from router.runtime.fair_threads import FairLanes, FairThreads
from router.runtime.stream import TokenSink

log = get_logger("router.text")
T = TypeVar("T")
# Characters or tokens up to which conversion is faster than starting a thread.
INLINE = 2000
# Characters or tokens up to which a job may use the reserved lane.
SHORT = 2**15
THREADS = max(2, min(8, (os.cpu_count() or 2) - 1))
# Processes for chat templates. Long conversations use one of them.
RENDERERS = 2
# Seconds of a rendering after which the tenant's conversations count as long ones, for this time.
SLOW_S = 0.5
SLOW_FOR_S = 60.0
# Timeout of the first rendering, which imports and compiles.
_WARM_UP_S = 20.0
_WARM_UP = ChatOptions(
    tools='[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]'
)
# Cost of a message of a conversation, in characters of equal cost.
MESSAGE_COST = 64
# Cost of detokenizing one token of an answer, for router.runtime.loop_slices.
TOKEN_COST = 2**10
# Limit on the characters of texts that threads process or that wait for a thread.
MAX_WAITING = 64 * 2**20
# Tokens at the end of a prompt that tell whether the model is thinking from the start.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Limit on a text's tokens, with its reason."""

    most: int
    why: str

    @classmethod
    def of_context(cls, max_model_len: int) -> TokenBound:
        """Returns the bound of a prompt: the context length less one token for the answer."""
        return cls(
            max_model_len - 1, f"the context holds {max_model_len} with at least one of the answer"
        )

    def check(self, field: str, tokens: int, how: str = "") -> None:
        """Raises InvalidArgument for the field if `tokens` is over the bound. `how` qualifies the
        number in the message, such as "at least ".
        """
        if tokens > self.most:
            raise InvalidArgument(
                f"{field} has {how}{tokens} tokens, and {self.why}; shorten it", field=field
            )


class Text:
    """Tokenizer and chat templates of the model. A model without a tokenizer takes and returns
    token ids, and its texts are empty.

    Long jobs run in the fair order of their tenants: see router.core.queueing.short_job_lanes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat: Sequence[ChatTemplate],
        tool_format: ToolFormatName = "auto",
    ) -> None:
        """`chat`: renderers, one for each conversation that is rendered at the same time. A
        renderer starts its process on first use.
        """
        self._tokenizer = tokenizer
        self._renderers = tuple(chat)
        self._idle = list(chat)
        # How the model writes tool calls; None if that is unknown.
        self.tool_format = (
            tool_format_of(self.chat_template)
            if tool_format == "auto"
            else TOOL_FORMATS[tool_format]
        )
        # The markers around the model's thinking; None for a model that does not show it.
        self.reasoning = reasoning_markers_of(self.chat_template)
        self._thinking = _marker_tokens(self.reasoning, tokenizer)
        self._chat_turns = FairLanes(len(chat), SHORT)
        # Until when, by tenant.
        self._slow: dict[str, float] = {}
        self._threads = FairThreads(THREADS, SHORT, "tokenizer")
        self._waiting = BodyBudget(MAX_WAITING, "long texts to tokenize")

    @classmethod
    def load(cls, folder: str, tool_format: ToolFormatName = "auto") -> Text:
        """Loads tokenizer and chat templates from the folder. Raises ModelRefused if they are
        broken.
        """
        chat = [
            one
            for one in (_unless_absent(ChatTemplate.load, folder) for _ in range(RENDERERS))
            if one is not None
        ]
        tokenizer = _unless_absent(Tokenizer.load, folder)
        if tokenizer is not None:
            # The first call scans the whole vocabulary.
            tokenizer.fewest_tokens("")
        return cls(tokenizer, chat, tool_format)

    async def warm_up(self) -> None:
        """Starts the renderer process that is used first, so that no request waits for that. The
        others start when conversations are rendered at the same time. A renderer that fails here
        starts again on its next use.
        """
        if self._idle:
            await _warm(self._idle[-1])

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._renderers)

    @property
    def chat_template(self) -> str:
        """The model's chat template; empty without one."""
        return self._renderers[0].source if self._renderers else ""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer."""
        return self._tokenizer is not None

    async def close(self) -> None:
        """Ends the threads and renderer processes."""
        await asyncio.gather(*(one.aclose() for one in self._renderers))
        self._threads.close()

    def fewest_tokens(self, text: str) -> int:
        """Returns a lower bound on the text's number of tokens, without tokenizing. Raises
        InvalidArgument without a tokenizer.
        """
        return self._needed().fewest_tokens(text)

    async def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        tenant: Tenant = ANONYMOUS,
        bound: TokenBound | None = None,
        field: str = "prompt",
    ) -> tuple[int, ...]:
        """Returns the token ids of the text.

        Raises ResourceExhausted if the tenant has too much text in progress, and InvalidArgument
        without a tokenizer, or for `field` if a long text is over the bound. The bound is checked
        before the tokenization where possible.
        """
        tokenizer = self._needed()
        if len(text) <= INLINE:
            return tuple(tokenizer.encode(text, add_special_tokens))
        if bound is None:
            return await self._in_turn(
                tenant, len(text), lambda: tuple(tokenizer.encode(text, add_special_tokens))
            )
        bound.check(field, tokenizer.fewest_tokens(text), "at least ")

        def encode() -> tuple[int, ...]:
            found = tokenizer.encode_within(text, bound.most, add_special_tokens)
            if isinstance(found, int):
                bound.check(field, found)
                raise AssertionError("encode_within gives a number only for what does not fit")
            return tuple(found)

        return await self._in_turn(tenant, len(text), encode)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tenant: Tenant = ANONYMOUS,
        bound: TokenBound | None = None,
        options: ChatOptions = WITHOUT_TOOLS,
    ) -> tuple[int, ...]:
        """Renders a conversation with the model's chat template and returns the token ids. The
        template writes the special tokens itself.

        Raises InvalidArgument with the template's own message, NotFound without a template,
        and the errors of `encode`.
        """
        self._needed()
        if not self._renderers:
            raise NotFound(
                "this model has no chat template; send a prompt instead of messages",
                field="messages",
            )
        prompt = await self._render(messages, tenant, options)
        return await self.encode(
            prompt, add_special_tokens=False, tenant=tenant, bound=bound, field="messages"
        )

    async def decode(self, token_ids: Sequence[int], tenant: Tenant = ANONYMOUS) -> str:
        """Returns the text of the token ids. Raises InvalidArgument without a tokenizer, and the
        errors of `encode`.
        """
        tokenizer = self._needed()
        if len(token_ids) <= INLINE:
            return tokenizer.decode(token_ids)
        return await self._in_turn(tenant, len(token_ids), lambda: tokenizer.decode(token_ids))

    @property
    def limits_thinking(self) -> bool:
        """Whether the model thinks between two tokens, so that its thinking can be ended."""
        return self._thinking is not None

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside the model's thinking."""
        return self.reasoning is not None and self.reasoning.begun(
            self.with_special_tokens(prompt[-_TAIL:])
        )

    def thinking_markers(self, prompt: Sequence[int]) -> ThinkingMarkers | None:
        """Returns the tokens around the thinking in an answer to the prompt; None if the model does
        not think between two tokens.
        """
        if self._thinking is None or not self.thinks(prompt):
            return self._thinking
        return replace(self._thinking, begin=None)

    def special_tokens(self, texts: Sequence[str]) -> frozenset[str]:
        """Returns those of the texts that are special tokens of the model."""
        found = self._tokenizer.special_tokens(texts) if self._tokenizer else {}
        return frozenset(found.values())

    def with_special_tokens(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a few token ids, including special tokens; empty without a
        tokenizer.
        """
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special=False)

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text; empty without a tokenizer."""
        return b"" if self._tokenizer is None else self._tokenizer.bytes_of(token_id)

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token's spelling in the vocabulary. Raises InvalidArgument without a
        tokenizer.
        """
        return self._needed().spell(token_ids)

    def open_stream(
        self, sampling: SamplingParams, prompt: Sequence[int], markers: Sequence[str] = ()
    ) -> TokenSink:
        """Returns the detokenizer of one answer. `markers`: special tokens that appear in the text.
        Raises InvalidArgument for stop strings without a tokenizer.
        """
        if self._tokenizer is None and not sampling.stop:
            return _NoText()
        return TextStream(self._needed(), sampling.stop, prompt, markers, sampling.min_tokens)

    def open_offsets(self, prompt: Sequence[int]) -> TokenOffsets:
        """Returns the offsets of one answer's tokens in its text. Raises
        InvalidArgument without a tokenizer.
        """
        return TokenOffsets(self._needed(), prompt)

    async def _render(
        self, messages: Sequence[ChatMessage], tenant: Tenant, options: ChatOptions
    ) -> str:
        loop = asyncio.get_running_loop()
        cost = size = len(options.tools) + sum(map(_cost, messages))
        if self._slow.get(tenant.name, 0.0) > loop.time():
            cost = max(cost, SHORT + 1)
        evicted = asyncio.timeout(None)
        with self._waiting.holding(tenant, lambda: evicted.reschedule(loop.time())) as holding:
            self._waiting.grow(holding, size)
            try:
                async with evicted, self._chat_turns.turn(tenant, cost):
                    renderer, begun = self._idle.pop(), loop.time()
                    try:
                        # A cancelled call would end the process, and the next would start it.
                        return await to_its_end(renderer.render(messages, options))
                    finally:
                        self._idle.append(renderer)
                        self._took(tenant, begun, loop.time())
            except TimeoutError:
                if not holding.evicted:
                    raise
                raise self._waiting.refusal() from None

    def _took(self, tenant: Tenant, begun: float, now: float) -> None:
        """A template can take long over a short conversation. A tenant that sends such ones must
        not hold all renderers. Without tokens there is a single tenant.
        """
        if tenant.name and now - begun > SLOW_S:
            self._slow = {name: until for name, until in self._slow.items() if until > now}
            self._slow[tenant.name] = now + SLOW_FOR_S

    async def _in_turn(self, tenant: Tenant, cost: int, work: Callable[[], T]) -> T:
        evicted = asyncio.timeout(None)
        loop = asyncio.get_running_loop()
        with self._waiting.holding(tenant, lambda: evicted.reschedule(loop.time())) as holding:
            self._waiting.grow(holding, cost)
            try:
                async with evicted:
                    return await self._threads.run(tenant, cost, work)
            except TimeoutError:
                if not holding.evicted:
                    raise
                raise self._waiting.refusal() from None

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidArgument(
                "this model has no tokenizer; send token ids as the prompt, and no stop strings",
                field="prompt",
            )
        return self._tokenizer


def _cost(message: ChatMessage) -> int:
    """Cost of rendering the message, in characters."""
    calls = sum(MESSAGE_COST + len(one.name) + len(one.arguments) for one in message.tool_calls)
    texts = (message.role, message.content, message.reasoning, message.tool_call_id, message.name)
    return MESSAGE_COST + calls + sum(len(one) for one in texts if one is not None)


def replay(sink: TokenSink, token_ids: Sequence[int]) -> Generator[int, None, None]:
    """Pushes tokens that the client already has, in the steps of router.runtime.loop_slices."""
    for token_id in token_ids:
        sink.push(token_id)
        yield TOKEN_COST


async def _warm(renderer: ChatTemplate) -> None:
    try:
        await renderer.render([ChatMessage("user", "Hello")], _WARM_UP, cpu_s=_WARM_UP_S)
    except InvalidArgument:
        # The template wants other messages, and its process has started.
        return
    except KvRelayError as error:
        log.warning("chat_template_warm_up_failed", reason=error.message)


def _marker_tokens(
    markers: ReasoningMarkers | None, tokenizer: Tokenizer | None
) -> ThinkingMarkers | None:
    if markers is None or tokenizer is None:
        return None
    begin, end = map(tokenizer.token_id, (markers.begin, markers.end))
    return None if begin is None or end is None else ThinkingMarkers(begin, end)


def _unless_absent(load: Callable[[str], T], folder: str) -> T | None:
    try:
        return load(folder)
    except NotFound:
        return None


class _NoText:
    stopped = False
    stop_string = None

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
