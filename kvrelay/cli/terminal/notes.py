"""Notes of kvrelay itself, on stderr beside a command's output."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
from typing import IO

import typer


def note(text: str) -> None:
    """Prints a note on stderr. On a terminal, words stay whole."""
    typer.echo(wrapped(f"kvrelay: {text}", sys.stderr), err=True)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def note_waits() -> None:
    """From now on, notes say why a client waits before it asks again."""
    waits = logging.getLogger("kvrelay.client")
    if not waits.handlers:
        waits.addHandler(_Notes())
        waits.setLevel(logging.INFO)


def wrapped(line: str, file: IO[str], indent: int = 0) -> str:
    """Returns a line in lines of the terminal's width, and as it is for other files.

    indent: columns before each line but the first.
    """
    if not file.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
