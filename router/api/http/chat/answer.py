"""What one choice of a chat says: its text, reasoning and tool calls as they grow. Each dialect
renders it in its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO

import xxhash

from kvrelay.wire.inference import GenerateResponse
from router.frontend.answer_parsers.events import (
    CallArguments,
    CallStarted,
    Content,
    Event,
    Reasoning,
)
from router.frontend.answer_parsers.parser import AnswerParser

# Some templates accept only ids of nine letters and digits.
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9


class ChatAnswer:
    """The message of one choice. Without a parser, all text is content."""

    def __init__(
        self,
        choice_id: str,
        parser: AnswerParser | None = None,
        parallel: bool = True,
        calls_only: bool = False,
    ) -> None:
        """`choice_id`: distinguishes the ids of the calls from those of other answers. `parallel`:
        whether calls after the first are kept. `calls_only`: whether text that is no call is the
        rest of one that was cut off, and is dropped.
        """
        self.calls_only = calls_only
        # Whether the answer has a call.
        self.called = False
        # Estimate of the tokens of the reasoning, until the last response has told them.
        self.reasoning_tokens = 0
        self._choice_id = choice_id
        self._parser = parser
        self._parallel = parallel
        # Tokens of responses that have told nothing yet.
        self._untold = 0

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self._parser is None

    def hear(self, response: GenerateResponse) -> Sequence[Event]:
        """Parses the next response. Returns what it says, in order."""
        if self._parser is None:
            return (Content(response.text),) if response.text else ()
        found = self._parser.push(response.text) if response.text else []
        if response.finish_reason is not None:
            found = [*found, *self._parser.finish()]
        self._count(found, len(response.token_ids))
        if response.usage is not None and response.usage.reasoning_tokens:
            # Exact for models that think between two tokens.
            self.reasoning_tokens = response.usage.reasoning_tokens
        said = [one for one in found if self._kept(one)]
        self.called = self.called or any(isinstance(one, CallStarted) for one in said)
        return said

    def call_id(self, index: int) -> str:
        """Returns the id of the call `index`."""
        number = xxhash.xxh3_64_intdigest(f"{self._choice_id}-{index}".encode())
        letters = []
        for _ in range(_ID_LENGTH):
            number, letter = divmod(number, len(_ID_LETTERS))
            letters.append(_ID_LETTERS[letter])
        return "".join(letters)

    def _kept(self, event: Event) -> bool:
        if isinstance(event, CallStarted | CallArguments):
            return self._parallel or not event.index
        return not (self.calls_only and isinstance(event, Content))

    def _count(self, said: Sequence[Event], tokens: int) -> None:
        """Counts the tokens of a response, and of those before it that told nothing. They belong to
        reasoning in proportion to its characters.
        """
        self._untold += tokens
        if not said:
            return
        thought = sum(len(one.text) for one in said if isinstance(one, Reasoning))
        if thought:
            told = sum(len(one.name if isinstance(one, CallStarted) else one.text) for one in said)
            self.reasoning_tokens += round(self._untold * thought / told)
        self._untold = 0


@dataclass(slots=True)
class Part:
    """A part of a message: consecutive text, consecutive reasoning, or a call with its
    arguments.
    """

    kind: type[Content] | type[Reasoning] | type[CallStarted]
    # Of a call.
    index: int = 0
    name: str = ""
    _text: StringIO = field(default_factory=StringIO)

    @property
    def text(self) -> str:
        """The text, the reasoning, or the arguments."""
        return self._text.getvalue()

    def write(self, text: str) -> None:
        """Adds text."""
        self._text.write(text)


class Parts:
    """The parts of a growing message, in their order. They do not depend on where the answer was
    cut into responses.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def last(self) -> Part:
        """The part that grows."""
        return self._parts[-1]

    def add(self, said: Iterable[Event]) -> None:
        """Adds what was said."""
        for event in said:
            if self.begins(event):
                self.begin(event)
            if not isinstance(event, CallStarted):
                self.last.write(event.text)

    def begins(self, event: Event) -> bool:
        """Whether the event begins a part."""
        if isinstance(event, CallStarted) or not self._parts:
            return True
        return not isinstance(event, CallArguments) and self.last.kind is not type(event)

    def begin(self, event: Event) -> None:
        """Begins the part of the event."""
        match event:
            case CallStarted(index, name):
                self._parts.append(Part(CallStarted, index, name))
            case Content() | Reasoning():
                self._parts.append(Part(type(event)))
            case CallArguments():
                raise AssertionError("arguments follow the start of their call")

    def texts(self, kind: type[Content] | type[Reasoning]) -> str:
        """Returns all text of the kind."""
        return "".join(one.text for one in self._parts if one.kind is kind)

    @property
    def calls(self) -> list[Part]:
        """The calls."""
        return [one for one in self._parts if one.kind is CallStarted]
