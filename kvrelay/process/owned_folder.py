"""A temporary folder that exists as long as the process that created it.

Beside each folder lies a lock file, which the owner of the folder locks. The kernel releases the
lock when the process ends for any reason. The lock file is created before the folder and removed
after it, so a later process finds and removes the folder wherever its owner was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from kvrelay.open_path import is_open_at

SHORT_PARENT = Path("/tmp")
"""For folders of sockets whose paths would be too long below TMPDIR."""

_LOCK_FILE = re.compile(r"kvrelay-[a-z]+-[0-9a-f]{8}\.lock")
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class OwnedFolder:
    """Context manager; `path` is valid inside it. On entry, removes the folders of processes that
    have ended.
    """

    def __init__(self, name: str, parent: Path | None = None) -> None:
        """The folder is `kvrelay-NAME-` and eight hexadecimal digits in `parent`, by default the
        folder for temporary files. `name` consists of lower-case letters.
        """
        self._name = name
        self._parent = parent
        self._lock = -1
        self.path = Path()

    def __enter__(self) -> OwnedFolder:
        """Raises OSError if the folder cannot be created."""
        parent = self._parent or Path(tempfile.gettempdir())
        remove_abandoned_folders(parent)
        while not self._create(parent / f"kvrelay-{self._name}-{secrets.token_hex(4)}"):
            pass
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            _remove(_lock_file(self.path))
        finally:
            os.close(self._lock)

    def _create(self, path: Path) -> bool:
        """Returns False if the name is taken, or if another process removed the lock file before it
        was locked.
        """
        try:
            lock = os.open(_lock_file(path), _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, lock)
            if not _locks(lock, _lock_file(path)):
                return False
            path.mkdir(mode=0o700)
            undo.pop_all()
        self.path, self._lock = path, lock
        return True


def remove_abandoned_folders(parent: Path) -> None:
    """Removes the folders in `parent` that belong to this user and whose owner has ended."""
    for path in parent.glob("kvrelay-*.lock"):
        if _LOCK_FILE.fullmatch(path.name):
            # For example the file of another user, or a file that its owner removes meanwhile.
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_if_abandoned(path: Path) -> None:
    lock = os.open(path, _OPEN)
    try:
        if os.fstat(lock).st_uid == os.getuid() and _locks(lock, path):
            _remove(path)
    finally:
        os.close(lock)


def _locks(lock: int, path: Path) -> bool:
    """Locks the open file. Returns False if another process holds the lock, or removed the file
    from `path` before it was locked.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return is_open_at(lock, path)


def _remove(path: Path) -> None:
    """Removes the folder of a lock file and then the lock file. If something of the folder cannot
    be removed, for example because a process still writes there, a later process tries again.
    """
    folder = path.with_suffix("")
    if folder.is_dir() and folder.lstat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        path.unlink(missing_ok=True)
