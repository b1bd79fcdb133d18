"""What is neither a file nor a folder, such as a pipe."""

from __future__ import annotations

from pathlib import Path


def is_special(path: str | Path) -> bool:
    """Whether the path names something that is neither a file nor a folder. To open a pipe is to
    wait for its writer.
    """
    found = Path(path)
    return found.exists() and not (found.is_file() or found.is_dir())
