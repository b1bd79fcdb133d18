"""Prints a text that arrives in pieces."""

from __future__ import annotations

import os
import re
from typing import TextIO

from rich.cells import cell_len

_TAB = 8
# Characters that would move the cursor, change the terminal or reorder what it shows.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TypedText:
    """Prints a text as it arrives. On a terminal, a word that does not fit its line moves to the
    next line, and the spaces before the first word are left out: they belong between a prompt and
    its answer. Control characters of the text are shown as replaced there.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_terminal = file.isatty()
        # 0: unknown, or the file is no terminal.
        self._width = _usable_width(file) if self._is_terminal else 0
        self._begun = not self._is_terminal
        self._column = 0
        self._word = ""

    def add(self, text: str) -> None:
        """Prints the next piece of the text."""
        if self._is_terminal:
            text = _CONTROLS.sub(_REPLACEMENT, text.replace("\r", ""))
        if not self._begun:
            text = text.lstrip(" ")
            self._begun = bool(text)
        if self._width:
            text = "".join(map(self._placed, text))
        self._file.write(text)
        self._file.flush()

    def _placed(self, character: str) -> str:
        """Returns the character, with what moves it and its word to the next line if needed."""
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        size = _TAB - self._column % _TAB if character == "\t" else cell_len(character)
        is_space = character in " \t"
        before = ""
        if self._column + size > self._width:
            moved = self._word
            cells = sum(map(cell_len, moved))
            # A word of a whole line breaks, as in a script without spaces.
            if is_space or cells >= self._column:
                moved, cells = "", 0
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


def _usable_width(file: TextIO) -> int:
    """Returns the columns to use on a terminal, and 0 if they are unknown. A cursor behind the last
    column would not move back as others do.
    """
    try:
        return max(0, os.get_terminal_size(file.fileno()).columns - 1)
    except OSError:
        return 0
