"""Text to tokens and back for the router's model, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from kvrelay.engine.chat import ChatTemplate
from kvrelay.engine.text import TextStream, Tokenizer
from kvrelay.errors import NotFound, ResourceExhausted
from router.stream import TokenSink

T = TypeVar("T")
INLINE = 2000  # characters or tokens: so many are converted before a thread would have begun
THREADS = max(2, min(8, (os.cpu_count() or 2) - 1))
MAX_WAITING = 64 * 2**20  # characters of texts that are with the threads or wait for one


class Text:
    """A model without a tokenizer is given token ids and answers in them: its text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, chat: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._waiting = 0  # characters

    @classmethod
    def load(cls, folder: str) -> Text:
        """Raises ModelRefused for a broken tokenizer or chat template."""
        return cls(_unless_absent(Tokenizer.load, folder), _unless_absent(ChatTemplate.load, folder))

    @property
    def has_chat(self) -> bool:
        return self._chat is not None

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises NotFound without a tokenizer, ResourceExhausted while too much is being encoded."""
        tokenizer = self._needed()
        if len(text) <= INLINE:
            return tuple(tokenizer.encode(text, add_special_tokens))
        with self._room(len(text)):
            return await self._in_thread(lambda: tuple(tokenizer.encode(text, add_special_tokens)))

    async def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """(role, content) pairs through the model's chat template, which writes out the special tokens by itself.

        Raises InvalidArgument with the template's own words, NotFound without a template or tokenizer, and as `encode`.
        """
        if self._chat is None:
            raise NotFound("this model has no chat template; send a prompt instead of messages", field="messages")
        with self._room(sum(len(role) + len(content) for role, content in messages)):
            prompt = await self._chat.render(messages)
        return await self.encode(prompt, add_special_tokens=False)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Raises NotFound without a tokenizer."""
        if len(token_ids) <= INLINE:
            return self._needed().decode(token_ids)
        return await self._in_thread(lambda: self._needed().decode(token_ids))

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it. Raises NotFound without a tokenizer."""
        return self._needed().spell(token_ids)

    def open_stream(self, stop: tuple[str, ...], prompt: Sequence[int]) -> TokenSink:
        """Raises NotFound for stop strings without a tokenizer."""
        if self._tokenizer is None and not stop:
            return _NoText()
        return TextStream(self._needed(), stop, prompt)

    @contextmanager
    def _room(self, characters: int) -> Iterator[None]:
        if self._waiting and self._waiting + characters > MAX_WAITING:
            raise ResourceExhausted("too many long texts are being tokenized", retry_after_s=1.0)
        self._waiting += characters
        try:
            yield
        finally:
            self._waiting -= characters

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NotFound("this model has no tokenizer; send token_ids, and no stop strings", field="prompt")
        return self._tokenizer


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
