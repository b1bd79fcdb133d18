"""The formats of DeepSeek V3 and R1, and of DeepSeek V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Oslo"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat templates of these models.
"""

from __future__ import annotations

from router.frontend.answer_parsers.stepped_parser import MarkedParser
from router.frontend.answer_parsers.text_reader import NAME, Steps
from router.frontend.answer_parsers.tools import Tools

MARKERS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)

_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END = MARKERS
_FENCE = "```"


class DeepSeekParser(MarkedParser):
    """Parses both formats. The arguments follow the name either in a code fence or at once, so the
    format is clear from each call. The marker before the first call may be missing.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__((_CALLS_BEGIN, _CALL_BEGIN), (_CALL_END, _CALLS_END))

    def call(self, marker: str) -> Steps[bool]:
        """See MarkedParser."""
        if marker == _CALLS_BEGIN:
            yield from self.reader.spaces()
            if not (yield from self.reader.accept(_CALL_BEGIN)):
                return False
        yield from self.reader.spaces()
        name = yield from self.reader.run(NAME)
        if not (yield from self.reader.accept(_SEPARATOR)):
            return False
        yield from self.reader.spaces()
        if (yield from self.reader.peek()) != "{":
            # The text before the separator is the type of the call.
            name = yield from self.reader.run(NAME)
            yield from self.reader.spaces()
        yield from self._fence()
        if not name or (yield from self.reader.peek()) != "{":
            return False
        self.start_call(name)
        yield from self.reader.json_value(self.add_arguments)
        yield from self.reader.spaces()
        yield from self.reader.accept(_FENCE)
        return True

    def _fence(self) -> Steps[None]:
        if (yield from self.reader.accept(_FENCE)):
            yield from self.reader.accept("json")
            yield from self.reader.spaces()
