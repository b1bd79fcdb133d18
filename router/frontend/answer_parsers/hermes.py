"""The format of Hermes 2 and 3, Qwen 2.5 and Qwen 3.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Source: the chat templates of these models.
"""

from __future__ import annotations

from router.frontend.answer_parsers.call_object import CallObject
from router.frontend.answer_parsers.stepped_parser import MarkedParser
from router.frontend.answer_parsers.text_reader import Steps
from router.frontend.answer_parsers.tools import Tools

MARKERS = ("<tool_call>", "</tool_call>")

_BEGIN, _END = MARKERS


class HermesParser(MarkedParser):
    """Parses calls between <tool_call> and </tool_call>. The end marker may be missing."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((_BEGIN,), (_END,))

    def call(self, marker: str) -> Steps[bool]:
        """See MarkedParser."""
        yield from self.reader.spaces()
        if not (yield from self.reader.accept("{")):
            return False
        return (yield from CallObject(self).read())
