"""The folder of a local Ray's sockets and logs. It exists as long as the process that started
Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

# Not TMPDIR, because the path of a Unix socket must be short.
PARENT = Path("/tmp")
_PREFIX = "kvrelay-ray-"
# The process that owns the folder locks this file. The kernel releases the lock when the process
# ends for any reason.
_LOCK = "owner"


class RayFolder:
    """Context manager; `path` is valid inside it. On entry, removes the folders of killed
    processes.
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
        # Ray may still be writing its last log lines.
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Removes the folders of this user whose owner process has ended."""
    for folder in PARENT.glob(f"{_PREFIX}*"):
        # The folder belongs to another user, is locked by its owner, or is new and not locked yet.
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
