"""The formats in which the answer is the JSON of a call, without a marker.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "get_time", "parameters": {}}
    [{"name": "get_weather", "arguments": {"city": "Oslo"}}]

Llama 3 separates calls by a semicolon, and may write <|python_tag|> before them.

Source: the chat templates of Llama 3.1 to 3.3.
"""

from __future__ import annotations

from router.frontend.answer_parsers.call_object import CallObject, read_list
from router.frontend.answer_parsers.stepped_parser import MarkedParser
from router.frontend.answer_parsers.text_reader import MarkerSet, Steps
from router.frontend.answer_parsers.tools import Tools, tool_names

PYTHON_TAG = "<|python_tag|>"

_BRACKETS = ("{", "[")
_TAGS = MarkerSet(PYTHON_TAG)


class BareJsonParser(MarkedParser):
    """Parses calls at the start of the answer, and after <|python_tag|>.

    An object is a call if its name is the name of a tool and it has arguments. After the tag, any
    name is allowed, and the arguments may be missing.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__((*_BRACKETS, PYTHON_TAG), (";",))
        self._names = tool_names(tools)

    def answer(self) -> Steps[None]:
        """See SteppedParser."""
        spaces = yield from self.reader.spaces()
        marker = yield from self.reader.accept(*_BRACKETS)
        if marker:
            yield from self.calls(marker, spaces)
        else:
            self.add_content(spaces)
        while marker := (yield from self.reader.until(_TAGS, self.add_content)):
            yield from self.calls(marker)

    def call(self, marker: str) -> Steps[bool]:
        """See MarkedParser."""
        bare = marker != PYTHON_TAG
        if not bare:
            yield from self.reader.spaces()
            marker = yield from self.reader.accept(*_BRACKETS)
        if marker == "[":
            return (yield from read_list(self, lambda: CallObject(self, bare, self._names)))
        return bool(marker) and (yield from CallObject(self, bare, self._names).read())
