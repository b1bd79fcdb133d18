"""The formats of Mistral's models.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, ...]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}
    [TOOL_CALLS]get_weather{"city": "Oslo"}

Source: the chat templates of these models, and the tokenizers of mistral-common.
"""

from __future__ import annotations

from router.frontend.answer_parsers.call_object import CallObject, read_list
from router.frontend.answer_parsers.stepped_parser import MarkedParser
from router.frontend.answer_parsers.text_reader import NAME, Steps
from router.frontend.answer_parsers.tools import Tools

MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

_TOOL_CALLS, _CALL_ID, _ARGS = MARKERS


class MistralParser(MarkedParser):
    """Parses calls after [TOOL_CALLS]."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((_TOOL_CALLS,))

    def call(self, marker: str) -> Steps[bool]:
        """See MarkedParser."""
        yield from self.reader.spaces()
        bracket = yield from self.reader.accept("{", "[")
        if bracket == "[":
            return (yield from read_list(self, lambda: CallObject(self)))
        if bracket == "{":
            return (yield from CallObject(self).read())
        return (yield from self._named_call())

    def _named_call(self) -> Steps[bool]:
        name = yield from self.reader.run(NAME)
        if (yield from self.reader.accept(_CALL_ID)):
            yield from self.reader.run(NAME)
        yield from self.reader.accept(_ARGS)
        yield from self.reader.spaces()
        if not name or (yield from self.reader.peek()) != "{":
            return False
        self.start_call(name)
        yield from self.reader.json_value(self.add_arguments)
        return True
