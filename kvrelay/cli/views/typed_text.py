"""Prints a text that arrives in pieces."""

from __future__ import annotations

import os
import re
from typing import TextIO

from rich.cells import cell_len

_TAB = 8
# Characters that would move the cursor, change the terminal or reorder what it shows.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_JOINER = "\N{ZERO WIDTH JOINER}"
# Two of these letters are a flag.
_FLAG_LETTER = re.compile("[\U0001f1e6-\U0001f1ff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TypedText:
    """Prints a text as it arrives. On a terminal, a word that does not fit its line moves to the
    next line, and the spaces before the first word are left out: they belong between a prompt and
    its answer. No line ends within an emoji of several characters. Control characters of the text
    are shown as replaced there.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_terminal = file.isatty()
        # 0: unknown, or the file is no terminal.
        self._width = _usable_width(file) if self._is_terminal else 0
        self._begun = not self._is_terminal
        self._in_line = False
        self._column = 0
        self._word = ""
        # The last characters, which a terminal may show as one.
        self._cluster = ""

    def add(self, text: str) -> None:
        """Prints the next piece of the text."""
        if self._is_terminal:
            text = _CONTROLS.sub(_REPLACEMENT, text.replace("\r", ""))
        if not self._begun:
            text = text.lstrip(" ")
            self._begun = bool(text)
        if self._width:
            text = "".join(map(self._placed, text))
        if text:
            self._in_line = not text.endswith("\n")
        self._file.write(text)
        self._file.flush()

    def end_line(self) -> None:
        """Begins a new line for something else, unless the text is at the begin of one."""
        if self._in_line:
            self._file.write("\n")
            self._file.flush()
            self._in_line = False
            self._column, self._word, self._cluster = 0, "", ""

    def _placed(self, character: str) -> str:
        """Returns the character, with what moves it and its word to the next line if needed."""
        if character == "\n":
            self._column, self._word, self._cluster = 0, "", ""
            return character
        size = _TAB - self._column % _TAB if character == "\t" else cell_len(character)
        is_space = character in " \t"
        joined = self._cluster if not is_space and self._joins(character, size) else ""
        self._cluster = joined + character
        before = ""
        if self._column + size > self._width and _cells(joined) < max(1, self._column):
            moved = self._word
            # A word that is longer than a line breaks, as in a script without spaces.
            if is_space or _cells(moved) >= self._column or _cells(moved) + size > self._width:
                moved = joined
            cells = _cells(moved)
            if moved:
                before = f"\x1b[{cells}D\x1b[K"
            before += f"\n{moved}"
            self._column, self._word = cells, moved
            if is_space:
                return before
        self._column += size
        # A combining character before a word belongs to what is before it.
        if size or self._word:
            self._word = "" if is_space else self._word + character
        return before + character

    def _joins(self, character: str, size: int) -> bool:
        """Whether a terminal may show the character as one with those before it."""
        if not self._cluster:
            return False
        flag = _FLAG_LETTER.fullmatch(self._cluster) and _FLAG_LETTER.match(character)
        return size == 0 or self._cluster[-1] == _JOINER or bool(flag)


def _cells(text: str) -> int:
    """Returns the columns of a text on a terminal that shows each character by itself."""
    return sum(map(cell_len, text))


def _usable_width(file: TextIO) -> int:
    """Returns the columns to use on a terminal, and 0 if they are unknown. A cursor behind the last
    column would not move back as others do.
    """
    try:
        return max(0, os.get_terminal_size(file.fileno()).columns - 1)
    except OSError:
        return 0
