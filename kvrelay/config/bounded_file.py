"""Reads files that a user names, in bounded memory: the name may be that of a log or a device."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from kvrelay.planning.quantity import size

# Characters of a line: those of a trace have an entry for each 512 tokens of a prompt.
MAX_LINE = 16 * 2**20


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """Returns the rest of a file. Raises OSError if it has more than `most` bytes."""
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than the allowed {size(most)}")
    return content


def file_bytes(path: Path, most: int) -> bytes:
    """Returns the content of a file, like `read_at_most`."""
    with path.open("rb") as file:
        return read_at_most(file, most)


def bounded_lines(file: IO[str], most: int = MAX_LINE) -> Iterator[str]:
    """Yields the lines of a file. Raises OSError for a line of more than `most` characters."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"a line has more than the allowed {most:,} characters")
        yield line
