"""Text to tokens and back for the router's model, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.tokenizer.tokenizer import TextStream, Tokenizer
from router.core.body_budget import BodyBudget
from router.runtime.fair_threads import FairLanes, FairThreads
from router.runtime.stream import TokenSink

T = TypeVar("T")
INLINE = 2000  # characters or tokens: so many are converted before a thread would have begun
SHORT = 2**15  # characters or tokens: those that a lane is kept free for
THREADS = max(2, min(8, (os.cpu_count() or 2) - 1))
RENDERERS = 2  # processes for chat templates, of which long conversations get one
MESSAGE_COST = 64  # of a message of a conversation, in characters that take as long
# Of a token whose text is decoded in the order of an answer, to router.runtime.loop_slices
TOKEN_COST = 2**10
MAX_WAITING = 64 * 2**20  # characters of texts that are with the threads or wait for one


@dataclass(frozen=True, slots=True)
class TokenBound:
    """How many tokens a text may have, and why."""

    most: int
    why: str

    @classmethod
    def of_context(cls, max_model_len: int) -> TokenBound:
        return cls(
            max_model_len - 1, f"the context holds {max_model_len} with at least one of the answer"
        )

    def check(self, field: str, tokens: int, how: str = "") -> None:
        """Raises InvalidArgument naming the field for more; `how` says how well their number is
        known.
        """
        if tokens > self.most:
            raise InvalidArgument(
                f"{field} has {how}{tokens} tokens, and {self.why}; shorten it", field=field
            )


class Text:
    """A model without a tokenizer is given token ids and answers in them: its text is empty.

    What takes long is done for one tenant after the other, as router.core.queueing.lanes has it.
    """

    def __init__(self, tokenizer: Tokenizer | None, chat: Sequence[ChatTemplate]) -> None:
        """`chat`: so many conversations are rendered at one time; each starts its process when it
        is used first.
        """
        self._tokenizer = tokenizer
        self._renderers = tuple(chat)
        self._idle = list(chat)
        self._chat_turns = FairLanes(len(chat), SHORT)
        self._threads = FairThreads(THREADS, SHORT, "tokenizer")
        self._waiting = BodyBudget(MAX_WAITING, "long texts to tokenize")

    @classmethod
    def load(cls, folder: str) -> Text:
        """Raises ModelRefused for a broken tokenizer or chat template."""
        chat = [
            one
            for one in (_unless_absent(ChatTemplate.load, folder) for _ in range(RENDERERS))
            if one is not None
        ]
        tokenizer = _unless_absent(Tokenizer.load, folder)
        if tokenizer is not None:
            tokenizer.fewest_tokens("")  # it looks through the whole vocabulary, the first time
        return cls(tokenizer, chat)

    @property
    def has_chat(self) -> bool:
        return bool(self._renderers)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    async def close(self) -> None:
        await asyncio.gather(*(one.aclose() for one in self._renderers))
        self._threads.close()

    def fewest_tokens(self, text: str) -> int:
        """A number that the tokens of the text cannot be fewer than, found without tokenizing.
        Raises NotFound.
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
        """Raises NotFound without a tokenizer, ResourceExhausted while the tenant has too much to
        be encoded, InvalidArgument naming `field` for a long text over the bound, before tokenizing
        if it can be told.
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
        messages: Sequence[tuple[str, str]],
        tenant: Tenant = ANONYMOUS,
        bound: TokenBound | None = None,
    ) -> tuple[int, ...]:
        """(role, content) pairs through the model's chat template, which writes out the special
        tokens by itself.

        Raises InvalidArgument with the template's own words, NotFound without a template or
        tokenizer, and as `encode`.
        """
        if not self._renderers:
            raise NotFound(
                "this model has no chat template; send a prompt instead of messages",
                field="messages",
            )
        prompt = await self._render(messages, tenant)
        return await self.encode(
            prompt, add_special_tokens=False, tenant=tenant, bound=bound, field="messages"
        )

    async def decode(self, token_ids: Sequence[int], tenant: Tenant = ANONYMOUS) -> str:
        """Raises NotFound without a tokenizer, and as `encode`."""
        tokenizer = self._needed()
        if len(token_ids) <= INLINE:
            return tokenizer.decode(token_ids)
        return await self._in_turn(tenant, len(token_ids), lambda: tokenizer.decode(token_ids))

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it. Raises NotFound without a tokenizer."""
        return self._needed().spell(token_ids)

    def open_stream(self, stop: tuple[str, ...], prompt: Sequence[int]) -> TokenSink:
        """Raises NotFound for stop strings without a tokenizer."""
        if self._tokenizer is None and not stop:
            return _NoText()
        return TextStream(self._needed(), stop, prompt)

    async def _render(self, messages: Sequence[tuple[str, str]], tenant: Tenant) -> str:
        cost = sum(MESSAGE_COST + len(role) + len(content) for role, content in messages)
        evicted = asyncio.timeout(None)
        loop = asyncio.get_running_loop()
        with self._waiting.holding(tenant, lambda: evicted.reschedule(loop.time())) as holding:
            self._waiting.grow(holding, cost)
            try:
                async with evicted, self._chat_turns.turn(tenant, cost):
                    renderer = self._idle.pop()
                    try:
                        return await renderer.render(messages)
                    finally:
                        self._idle.append(renderer)
            except TimeoutError:
                if not holding.evicted:
                    raise
                raise self._waiting.refusal() from None

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
            raise NotFound(
                "this model has no tokenizer; send token_ids, and no stop strings", field="prompt"
            )
        return self._tokenizer


def replay(sink: TokenSink, token_ids: Sequence[int]) -> Generator[int, None, None]:
    """Pushes tokens that a client has already, in the steps of router.runtime.loop_slices."""
    for token_id in token_ids:
        sink.push(token_id)
        yield TOKEN_COST


def _unless_absent(load: Callable[[str], T], folder: str) -> T | None:
    try:
        return load(folder)
    except NotFound:
        return None


class _NoText:
    stopped = False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
