"""The assistant's message of one choice: its text, reasoning and tool calls as they grow."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import starmap
from json.encoder import encode_basestring_ascii
from typing import Any

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

# Characters that are parsed at once, with the cost of each for router.runtime.loop_slices.
_AT_ONCE = 4096
_COST = 8
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
        forced: bool = False,
        calls_only: bool = False,
    ) -> None:
        """`choice_id`: distinguishes the ids of the calls from those of other answers. `parallel`:
        whether calls after the first are kept. `forced`: whether the client named the function, so
        that the call is not the model's reason to end. `calls_only`: whether text that is no call
        is the rest of one that was cut off, and is dropped.
        """
        self._choice_id = choice_id
        self._parser = parser
        self._parallel = parallel
        self._forced = forced
        self._calls_only = calls_only
        self._called = False

    def delta(self, response: GenerateResponse) -> str:
        """Returns the JSON members of the delta for the next response."""
        members = ['"role":"assistant"'] if response.index == 0 else []
        if self._parser is None:
            if response.text or response.token_ids:
                members.append(f'"content":{encode_basestring_ascii(response.text)}')
            return ",".join(members)
        said = _Said()
        self._hear(said, response.text, response.finish_reason is not None)
        for name, text in (("reasoning_content", said.reasoning), ("content", said.content)):
            if text.tell():
                members.append(f'"{name}":{encode_basestring_ascii(text.getvalue())}')
        if said.calls:
            calls = ",".join(starmap(self._call_delta, said.calls.items()))
            members.append(f'"tool_calls":[{calls}]')
        return ",".join(members)

    def finish_reason(self, response: GenerateResponse) -> str | None:
        """Returns the finish reason of a response whose text has been parsed."""
        if response.finish_reason == "stop" and self._called and not self._forced:
            return "tool_calls"
        return response.finish_reason

    def message(self, text: str) -> Generator[int, None, dict[str, Any]]:
        """Returns the message of a whole answer, in the steps of router.runtime.loop_slices."""
        if self._parser is None:
            return {"role": "assistant", "content": text}
        said = _Said()
        for start in range(0, max(1, len(text)), _AT_ONCE):
            part = text[start : start + _AT_ONCE]
            self._hear(said, part, last=start + _AT_ONCE >= len(text))
            yield len(part) * _COST
        content = said.content.getvalue()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if said.reasoning.tell():
            message["reasoning_content"] = said.reasoning.getvalue()
        if said.calls:
            message["tool_calls"] = self._calls(said.calls)
        if said.calls or self._calls_only:
            message["content"] = content or None
        return message

    def _hear(self, said: _Said, text: str, last: bool) -> None:
        """Parses the next piece of the text."""
        assert self._parser is not None, "without a parser there are no events"
        self._add(said, self._parser.push(text) if text else [])
        if last:
            self._add(said, self._parser.finish())
        self._called = self._called or bool(said.calls)

    def _add(self, said: _Said, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Content(text) if not self._calls_only:
                    said.content.write(text)
                case Reasoning(text):
                    said.reasoning.write(text)
                case CallStarted(index, name) if self._parallel or not index:
                    said.calls[index] = _Call(name)
                case CallArguments(index, text) if self._parallel or not index:
                    said.calls.setdefault(index, _Call()).arguments.append(text)

    def _call_delta(self, index: int, call: _Call) -> str:
        function = f'"arguments":{encode_basestring_ascii("".join(call.arguments))}'
        if call.name is None:
            return f'{{"index":{index},"function":{{{function}}}}}'
        function = f'"name":{encode_basestring_ascii(call.name)},{function}'
        head = f'"id":"{self._id(index)}","type":"function"'
        return f'{{"index":{index},{head},"function":{{{function}}}}}'

    def _calls(self, calls: dict[int, _Call]) -> list[dict[str, Any]]:
        return [
            {
                "id": self._id(index),
                "type": "function",
                "function": {"name": one.name, "arguments": "".join(one.arguments)},
            }
            for index, one in calls.items()
        ]

    def _id(self, index: int) -> str:
        number = xxhash.xxh3_64_intdigest(f"{self._choice_id}-{index}".encode())
        letters = []
        for _ in range(_ID_LENGTH):
            number, letter = divmod(number, len(_ID_LETTERS))
            letters.append(_ID_LETTERS[letter])
        return "".join(letters)


@dataclass(slots=True)
class _Call:
    """A part of a call."""

    # None if the call started earlier.
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class _Said:
    """What a part of an answer says."""

    def __init__(self) -> None:
        self.content = StringIO()
        self.reasoning = StringIO()
        # By index.
        self.calls: dict[int, _Call] = {}
