"""Finds the end of a JSON value in text that comes in pieces."""

from __future__ import annotations

import re

# All patterns match one character, so that a search is linear.
_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r"[^\w \t\r\n,:+.-]")
_AFTER_SCALAR = re.compile(r"[^\w+.-]")


class JsonScanner:
    """Scans one JSON value: an object, an array, a string or a scalar.

    The scanner follows strings, escapes and nesting, and checks nothing else. A character that JSON
    allows in strings only, such as `<`, ends the value before that character. The state does not
    grow with the nesting.
    """

    __slots__ = ("_depth", "_escaped", "_in_scalar", "_in_string", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_scalar = False
        self._in_string = False
        self._escaped = False
        # Whether the value has ended.
        self.done = False

    def scan(self, text: str, start: int) -> int:
        """Returns the position in the text where the value ends, or the length of the text if the
        value goes on. The text from `start` follows the text of the last call.
        """
        position = start
        while position < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                position += 1
            elif self._in_string:
                position = self._scan_string(text, position)
            elif self._depth:
                position = self._scan_container(text, position)
            elif not self._in_scalar and text[position] in '"{[':
                position = self._open(text, position)
            else:
                position = self._scan_scalar(text, position)
        return position

    def _open(self, text: str, position: int) -> int:
        if text[position] == '"':
            self._in_string = True
        else:
            self._depth += 1
        return position + 1

    def _scan_string(self, text: str, start: int) -> int:
        match = _IN_STRING.search(text, start)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return match.end()

    def _scan_container(self, text: str, start: int) -> int:
        match = _IN_CONTAINER.search(text, start)
        if match is None:
            return len(text)
        if match[0] in '"{[':
            return self._open(text, match.start())
        if match[0] in "}]":
            self._depth -= 1
            self.done = self._depth == 0
            return match.end()
        self.done = True
        return match.start()

    def _scan_scalar(self, text: str, start: int) -> int:
        self._in_scalar = True
        match = _AFTER_SCALAR.search(text, start)
        if match is None:
            return len(text)
        self.done = True
        return match.start()
