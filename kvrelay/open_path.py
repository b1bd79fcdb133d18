"""Whether an open file or folder is still at its path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# The path, or a folder above it, is gone or something else.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Returns False if another process has removed or replaced what was opened. Raises OSError."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return False
