"""Text to tokens and back for the router's model, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.engine.text import Tokenizer, TextStream
from kvrelay.errors import NotFound
from router.stream import TokenSink

INLINE = 2000  # characters or tokens: so many are converted before a thread would have begun


class Text:
    """A model without a tokenizer is given token ids and answers in them: its text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str) -> Text:
        """Raises ModelRefused for a broken tokenizer."""
        try:
            return cls(Tokenizer.load(folder))
        except NotFound:
            return cls(None)

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises NotFound without a tokenizer."""
        if len(text) <= INLINE:
            return tuple(self._needed().encode(text, add_special_tokens))
        return tuple(await asyncio.to_thread(self._needed().encode, text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Raises NotFound without a tokenizer."""
        if len(token_ids) <= INLINE:
            return self._needed().decode(token_ids)
        return await asyncio.to_thread(self._needed().decode, token_ids)

    def open_stream(self, stop: tuple[str, ...], prompt: Sequence[int]) -> TokenSink:
        """Raises NotFound for stop strings without a tokenizer."""
        if self._tokenizer is None and not stop:
            return _NoText()
        return TextStream(self._needed(), stop, prompt)

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NotFound("this model has no tokenizer; send token_ids, and no stop strings", field="prompt")
        return self._tokenizer


class _NoText:
    stopped = False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
