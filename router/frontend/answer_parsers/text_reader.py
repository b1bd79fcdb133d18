"""Reads text that comes in pieces, as if it were there at once.

The methods of TextReader are generators. A generator yields when it needs more text. What it
returns depends on the text only, not on where the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from router.frontend.answer_parsers.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]

# The name of a function that ends at a marker.
NAME = re.compile(r"[\w.:/-]*")
_SPACES = re.compile(r"[ \t\r\n]*")


class MarkerSet:
    """Markers to look for in a text. A marker may contain another marker at its end only."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._longest = max(map(len, markers))
        self._first_characters = frozenset(marker[0] for marker in markers)

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Returns the position and the text of the first marker. Without a marker, returns "" and
        the position of the longest end of the text that could begin a marker.
        """
        match = self._pattern.search(text, start)
        if match is not None:
            return match.start(), match[0]
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_characters and self._may_begin(text[position:]):
                return position, ""
        return len(text), ""

    def _may_begin(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self.markers)


class TextReader:
    """A position in a text that grows. The reader forgets the text that was taken."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Appends text. The cost is linear since generators leave only a few characters."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def finish(self) -> None:
        """Tells that no more text comes."""
        self._ended = True

    @property
    def at_end(self) -> bool:
        """Whether all of the finished text was taken."""
        return self._ended and not self._left

    @property
    def _left(self) -> int:
        return len(self._text) - self._position

    def keep(self) -> None:
        """Keeps a copy of the text that is taken from now on."""
        self._kept = []

    def release(self) -> str:
        """Returns the text that was kept, and keeps no more."""
        kept, self._kept = self._kept or (), None
        return "".join(kept)

    def take(self) -> str:
        """Takes all the text that is there."""
        return self._take_to(len(self._text))

    def peek(self) -> Steps[str]:
        """Returns the next character, or "" at the end. Does not take the character."""
        while not self._left and not self._ended:
            yield
        return self._text[self._position : self._position + 1]

    def accept(self, *markers: str) -> Steps[str]:
        """Takes the marker that the text goes on with. Returns "" if there is none. No marker is a
        prefix of another marker.
        """
        while True:
            for marker in markers:
                if self._text.startswith(marker, self._position):
                    return self._take_to(self._position + len(marker))
            if self._ended or not any(map(self._may_become, markers)):
                return ""
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Takes the longest run that the pattern matches: any number of characters of a class."""
        pieces = []
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None, "the pattern does not match an empty run"
            pieces.append(self._take_to(match.end()))
            if self._left or self._ended:
                return "".join(pieces)
            yield

    def spaces(self) -> Steps[str]:
        """Takes the whitespace that the text goes on with."""
        return self.run(_SPACES)

    def until(self, markers: MarkerSet, emit: Callable[[str], None]) -> Steps[str]:
        """Emits the text before the first marker. Takes the marker, and returns it; at the end of
        the text, returns "".
        """
        while True:
            position, marker = markers.find(self._text, self._position)
            if self._ended and not marker:
                position = len(self._text)
            emit(self._take_to(position))
            if marker:
                return self._take_to(position + len(marker))
            if self._ended:
                return ""
            yield

    def json_value(self, emit: Callable[[str], None]) -> Steps[None]:
        """Emits the text of one JSON value, as JsonScanner finds its end."""
        scanner = JsonScanner()
        while True:
            emit(self._take_to(scanner.scan(self._text, self._position)))
            if scanner.done or self._ended:
                return
            yield

    def json_text(self) -> Steps[str]:
        """Takes the text of one JSON value, as JsonScanner finds its end."""
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        return "".join(pieces)

    def _may_become(self, marker: str) -> bool:
        return self._left < len(marker) and marker.startswith(self._text[self._position :])

    def _take_to(self, position: int) -> str:
        taken = self._text[self._position : position]
        self._position = position
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken
