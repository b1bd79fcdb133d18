"""The format of Qwen3-Coder and Qwen 3.5.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen3-Coder.
"""

from __future__ import annotations

import re

from router.frontend.answer_parsers.parameter_types import Types, escape, types_of, value_json
from router.frontend.answer_parsers.stepped_parser import MarkedParser
from router.frontend.answer_parsers.text_reader import MarkerSet, Steps
from router.frontend.answer_parsers.tools import Schema, Tools, mapping, parameters_of, tool_names

MARKERS = ("<tool_call>", "</tool_call>")

_BEGIN, _END = MARKERS
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
_CALL_ENDS = (_FUNCTION_END, _END)
# The newline before the end is not of the value.
_VALUE_END_MARKERS = MarkerSet(*_VALUE_ENDS, *(f"\n{end}" for end in _VALUE_ENDS))
_NAME = re.compile(r"[^\s<>]*")
_KEY = re.compile(r"[^\n<>]*")


class Qwen3CoderParser(MarkedParser):
    """Parses calls in XML. Writes the arguments as a JSON object, with the types of the tool's
    schema.

    String values are streamed. Other values are added when they are complete. <tool_call> may be
    missing before the name of a tool, and so may the end of a parameter or a function. If the
    answer ends in mid-call, or other text follows a parameter, the JSON object stays open.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__((_BEGIN, _FUNCTION), (_END,))
        self._tools = tools
        self._names = tool_names(tools)
        # By function and parameter.
        self._types: dict[tuple[str, str], Types] = {}

    def call(self, marker: str) -> Steps[bool]:
        """See MarkedParser."""
        if marker != _FUNCTION:
            yield from self.reader.spaces()
            if not (yield from self.reader.accept(_FUNCTION)):
                return False
        name = yield from self.reader.run(_NAME)
        if not name or not (yield from self.reader.accept(">")):
            return False
        if marker == _FUNCTION and self._names and name not in self._names:
            return False
        self.start_call(name)
        yield from self._arguments(name)
        return True

    def _arguments(self, name: str) -> Steps[None]:
        whole = parameters_of(self._tools, name)
        before = "{"
        tag = yield from self._tag()
        while tag == _PARAMETER:
            key = yield from self.reader.run(_KEY)
            if not (yield from self.reader.accept(">")):
                break
            self.add_arguments(f'{before}"{escape(key)}": ')
            before = ", "
            end = yield from self._value(self._types_of(name, key, whole))
            tag = end if end != _PARAMETER_END else (yield from self._tag())
        if tag in _CALL_ENDS:
            self.add_arguments("{}" if before == "{" else "}")

    def _types_of(self, function: str, parameter: str, whole: Schema) -> Types:
        key = (function, parameter)
        if key not in self._types:
            schema = mapping(whole.get("properties")).get(parameter)
            self._types[key] = types_of(schema, whole)
        return self._types[key]

    def _tag(self) -> Steps[str]:
        yield from self.reader.spaces()
        return (yield from self.reader.accept(_PARAMETER, *_CALL_ENDS))

    def _value(self, types: Types) -> Steps[str]:
        """Adds a value. Returns the marker that ends the value, or "" at the end of the answer."""
        yield from self.reader.accept("\n")
        if types.is_string:
            self.add_arguments('"')
            end = yield from self.reader.until(
                _VALUE_END_MARKERS, lambda text: self.add_arguments(escape(text))
            )
            self.add_arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from self.reader.until(_VALUE_END_MARKERS, pieces.append)
            text = "".join(pieces)
            self.add_arguments(value_json(text, types) if end else text)
        return end.lstrip("\n")
