"""Where a local Ray keeps its sockets and logs, for as long as the process lives that started
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

PARENT = Path("/tmp")  # not TMPDIR: a Unix socket's path is short
_PREFIX = "kvrelay-ray-"
# Locked by the process whose folder it is; the kernel unlocks it when that ends, however
_LOCK = "owner"


class RayFolder:
    """Context manager; `path` is valid inside it. Entered, it also takes away folders of those who
    were killed.
    """

    def __init__(self) -> None:
        self.path = ""
        self._lock = -1

    def __enter__(self) -> RayFolder:
        remove_abandoned_folders()
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=PARENT)
        self._lock = os.open(Path(self.path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # Ray's last words may still be written
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Those of this user whose owner has ended."""
    for folder in PARENT.glob(f"{_PREFIX}*"):
        # Another's, locked by its owner, or just made and not yet locked
        with contextlib.suppress(OSError):
            if folder.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
