"""The format of gpt-oss: messages with a header, each in a channel.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Oslo"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

The prompt ends after `<|start|>assistant`. The recipient may also stand before the channel.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.frontend.answer_parsers.stepped_parser import SteppedParser
from router.frontend.answer_parsers.text_reader import MarkerSet, Steps
from router.frontend.answer_parsers.tools import Tools

MARKERS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS = MARKERS
_HEADER_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE)
_HEADER_TEXT = re.compile(r"[\w.:=/ -]*")
_HEADER_WORD = re.compile(r"(?:<\|channel\|>)?[\w.:=/-]+")
# A header may also begin with the recipient.
_HEADER_BEGINS = (*_HEADER_MARKERS, "to=")
_NEW_HEADERS = MarkerSet(_START, _CHANNEL)
_BODY_ENDS = MarkerSet(*_ENDS, *_NEW_HEADERS.markers)


class HarmonyParser(SteppedParser):
    """Parses messages. A message to a recipient is a call, a message in the channel `analysis` is
    reasoning, and all other messages are content. Text outside of messages is content.

    The body of a call is its arguments, whatever it holds.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._add_body: Callable[[str], None] = self.add_content

    def answer(self) -> Steps[None]:
        """See SteppedParser."""
        spaces = yield from self.reader.spaces()
        begin = yield from self.reader.accept(*_HEADER_BEGINS)
        if not begin:
            self.add_content(spaces)
        while begin or not self.reader.at_end:
            if begin and (yield from self.attempt(spaces + begin, self._header(begin))):
                begin = yield from self._message()
            else:
                begin = yield from self.reader.until(_NEW_HEADERS, self.add_content)
            spaces = ""

    def _header(self, begin: str) -> Steps[bool]:
        """Reads a header up to <|message|>. Returns False if a character is not of a header."""
        pieces, marker = [begin], begin
        while marker and marker != _MESSAGE:
            pieces.append((yield from self.reader.run(_HEADER_TEXT)))
            marker = yield from self.reader.accept(*_HEADER_MARKERS)
            pieces.append(marker)
        if marker:
            self._begin_message("".join(pieces))
        return bool(marker)

    def _begin_message(self, header: str) -> None:
        words = _HEADER_WORD.findall(header)
        recipient = next((word for word in words if word.startswith("to=")), "")
        name = recipient.removeprefix("to=").removeprefix("functions.")
        if name:
            self.start_call(name)
            self._add_body = self.add_arguments
        elif f"{_CHANNEL}analysis" in words:
            self._add_body = self.add_reasoning
        else:
            self._add_body = self.add_content

    def _message(self) -> Steps[str]:
        """Reads the body of a message. Returns the beginning of the next header, or ""."""
        end = yield from self.reader.accept(*_BODY_ENDS.markers)
        if not end:
            if self._add_body == self.add_arguments:
                yield from self._object()
            end = yield from self.reader.until(_BODY_ENDS, self._add_body)
        elif self._add_body == self.add_arguments:
            self.add_arguments("{}")
        return end if end in _NEW_HEADERS.markers else (yield from self.next_call(_HEADER_BEGINS))

    def _object(self) -> Steps[None]:
        """Reads the object that arguments are. Markers in its strings are text."""
        self.add_arguments((yield from self.reader.spaces()))
        if (yield from self.reader.peek()) == "{":
            yield from self.reader.json_value(self.add_arguments)
