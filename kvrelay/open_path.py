"""Whether an open file or folder is still at its path."""

from __future__ import annotations

import os
from pathlib import Path


def is_open_at(descriptor: int, path: Path) -> bool:
    """Returns False if another process has removed or replaced what was opened. Raises OSError."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
