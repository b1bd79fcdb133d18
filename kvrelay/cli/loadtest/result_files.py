"""Writes the files of a result, which took its time to measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvrelay.cli.terminal.notes import note
from kvrelay.errors import KvRelayError


def write_results(*files: tuple[Path | None, Callable[[Path], None]]) -> bool:
    """Writes each file that is wanted with its function, and tells of each whether it was saved.
    Returns False if one could not be written; the others are written all the same.
    """
    all_saved = True
    for path, write_to in files:
        if path is None:
            continue
        try:
            write_to(path)
        except KvRelayError as error:
            note(error.message)
            all_saved = False
        else:
            note(f"saved {path}")
    return all_saved
