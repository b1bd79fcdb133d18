"""A worker's own folder of block files, and the folders of the other workers on the same path.

    PATH/worker-N/lock                        locked by the worker that writes here
    PATH/worker-N/LAYOUT/TENANT/HASH-IDENTITY.kv
    PATH/worker-N/LAYOUT/TENANT/….part        a file that is being written

Every folder has one writer, so no two processes agree on anything. All workers read all folders.
The kernel releases a lock when its process ends for any reason, and the next worker takes the
folder over, with its files.

A file is written under another name and then renamed, so a reader sees a whole file or none, also
if the writer is killed. Files are not flushed to the disk: after a power failure some may be torn,
their digests tell, and their KV is computed again. A flush would take milliseconds for each file.

All names consist of hexadecimal digits that this module makes; nothing from a request or a tenant
is part of a path. Slow calls, for the tier's threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvrelay.open_path import is_open_at
from kvrelay.types.kv_block import BlockKey, tenant_folder
from kvrelay.worker.tiers.block_file import HEADER_BYTES, BadBlockFile, BlockHeader

HostBytes = npt.NDArray[np.uint8]

# Folders of workers on one path, at most.
MAX_SLOTS = 256
_SLOT = re.compile(r"worker-([0-9]{1,3})")
_LAYOUT = re.compile(r"[0-9a-f]{16}")
_TENANT = re.compile(r"[0-9a-f]{16}")
_BLOCK = re.compile(r"([0-9a-f]{2,64})-([0-9a-f]{64})\.kv")
_PART = ".part"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PAGE_BYTES = 4096
# Errors of a name that something else has taken.
_TAKEN = (errno.EEXIST, errno.EISDIR, errno.ELOOP)
_NOT_OURS = (NotADirectoryError, PermissionError)


class FolderLost(FileNotFoundError):
    """The folder that was claimed is not at its path any more."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there at the start. `tenant` is the name of the tenant's folder."""

    path: Path
    tenant: str
    hash: bytes
    identity: bytes
    size: int
    modified_ns: int


def file_bytes(block_bytes: int) -> int:
    """What a file of one block takes on the disk: whole pages."""
    return -(-(HEADER_BYTES + block_bytes) // _PAGE_BYTES) * _PAGE_BYTES


class SlotFolder:
    """One worker's view of a path. `claim` comes first. Without a claim, only reads are possible.

    Lives in the tier's threads: one thread writes and removes, one reads.
    """

    def __init__(self, path: Path, layout: str, block_bytes: int) -> None:
        """layout: the layout hash, 16 hexadecimal digits, which stands for the model too."""
        assert _LAYOUT.fullmatch(layout), f"layout hash {layout!r}"
        self.path = path
        self._layout = layout
        self._block_bytes = block_bytes
        self._lock = -1
        # The worker's own folder.
        self._slot: Path | None = None
        # Folders that are known to exist.
        self._made: set[Path] = set()
        self._others: tuple[Path, ...] = ()

    @property
    def slot(self) -> Path | None:
        """The folder that this worker writes to; None without a claim."""
        return self._slot

    @property
    def others(self) -> tuple[Path, ...]:
        """The folders of other workers, as of the last `look_around`."""
        return self._others

    def claim(self) -> Path:
        """Locks a folder. Prefers a folder with files of this layout, then any that exists. Passes
        over names that something else has taken, such as a file or another user's folder.

        Raises OSError: the first one, if no folder can be had.
        """
        # A folder that was lost is still locked.
        self._unlock()
        self._made.clear()
        # Parents belong to the user; only what is created here has to be private.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        _check_private(self.path)
        numbers = self._slots()
        known = sorted(numbers, key=lambda one: (not (numbers[one] / self._layout).is_dir(), one))
        free = (number for number in range(MAX_SLOTS) if number not in numbers)
        first: OSError | None = None
        for number in (*known, *free):
            slot = self.path / f"worker-{number}"
            try:
                slot.mkdir(mode=0o700, exist_ok=True)
                _check_private(slot)
                locked = self._locks(slot)
            except OSError as error:
                if error.errno not in _TAKEN and not isinstance(error, _NOT_OURS):
                    raise
                first = first or error
                continue
            if locked:
                self._slot = slot
                self.look_around()
                return slot
        raise first or OSError(f"all {MAX_SLOTS} folders of {self.path} are in use by workers")

    def _locks(self, slot: Path) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(slot / "lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def check_claim(self) -> None:
        """Raises FolderLost if somebody has removed the folder. Another worker may have claimed its
        name since. Raises OSError.
        """
        assert self._slot is not None, "a folder is claimed before it is checked"
        if not is_open_at(self._lock, self._slot / "lock"):
            raise FolderLost(errno.ENOENT, "somebody has removed the folder", str(self._slot))

    def release(self) -> None:
        """Gives the folder up. Its files stay."""
        self._unlock()
        self._slot = None

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def look_around(self) -> None:
        """Finds the folders of other workers that have files of this layout. Raises OSError, also
        if other users can write to the path.
        """
        self._others = ()
        _check_private(self.path)
        self._others = tuple(
            slot
            for _, slot in sorted(self._slots().items())
            if slot != self._slot and (slot / self._layout).is_dir() and _is_private(slot)
        )

    def _slots(self) -> dict[int, Path]:
        found = {}
        for name in os.listdir(self.path):
            if (match := _SLOT.fullmatch(name)) and int(match[1]) < MAX_SLOTS:
                found[int(match[1])] = self.path / f"worker-{int(match[1])}"
        return found

    def scan(self) -> tuple[list[FoundFile], list[FoundFile]]:
        """Returns the files of this layout, and those of other layouts, each least recently
        modified first. Removes unfinished files. Leaves alone what has another name.

        Raises OSError.
        """
        assert self._slot is not None, "a folder is claimed before it is scanned"
        own: list[FoundFile] = []
        foreign: list[FoundFile] = []
        for layout in _folders(self._slot, _LAYOUT):
            for tenant in _folders(layout, _TENANT):
                (own if layout.name == self._layout else foreign).extend(_files(tenant))
        for found in (own, foreign):
            found.sort(key=lambda one: one.modified_ns)
        return own, foreign

    def has_expected_size(self, found: FoundFile) -> bool:
        """True if the file has the length of a block of this layout."""
        return found.size == HEADER_BYTES + self._block_bytes

    def write(self, key: BlockKey, data: HostBytes, digest: int) -> None:
        """Writes a block: its bytes, and their XXH3-64. Raises OSError, and then leaves nothing."""
        assert self._slot is not None, "a folder is claimed before it is written to"
        path = self._own(key)
        folder = path.parent
        if folder not in self._made:
            for part in (folder.parent, folder):
                part.mkdir(mode=0o700, exist_ok=True)
            self._made.add(folder)
        header = BlockHeader(self._layout, key.identity, len(data), digest).pack()
        part = path.with_suffix(_PART)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(part, flags, 0o600)
            try:
                _write_all(file, memoryview(header), data.data)
            finally:
                os.close(file)
            os.rename(part, path)
        except OSError as error:
            # Somebody may have removed the folder.
            self._made.discard(folder)
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise error

    def remove(self, key: BlockKey) -> None:
        """Removes a block's file, if it is there. Raises OSError."""
        if self._slot is not None:
            self.remove_file(self._own(key))

    def remove_file(self, path: Path) -> None:
        """Removes one of this folder's files, if it is there. Leaves a folder of that name, which
        no worker has made. Raises OSError.
        """
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(path)

    def holds_elsewhere(self, key: BlockKey) -> bool:
        """True if another worker's folder has a file of this name."""
        return any(os.path.lexists(self._in(slot, key)) for slot in self._others)

    def read(self, key: BlockKey, *, own: bool) -> tuple[HostBytes, int]:
        """Returns the bytes of a block, 1-D, and the digest that they should have. The digest is
        not checked here. `own`: from this worker's folder, otherwise from another worker's.

        Raises BadBlockFile for a file that is not of this block, and OSError.
        """
        if own:
            assert self._slot is not None, "a folder is claimed before it is read"
            return self._read(self._own(key), key)
        for slot in self._others:
            with contextlib.suppress(FileNotFoundError):
                return self._read(self._in(slot, key), key)
        raise FileNotFoundError("no worker of this host has the block any more")

    def _read(self, path: Path, key: BlockKey) -> tuple[HostBytes, int]:
        try:
            file = os.open(path, _READ)
        except OSError as error:
            # A link, or a socket.
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise BadBlockFile("the file is not a regular file") from None
            raise
        try:
            status = os.fstat(file)
            expected = HEADER_BYTES + self._block_bytes
            if not stat.S_ISREG(status.st_mode):
                raise BadBlockFile("the file is not a regular file")
            if status.st_uid not in (os.getuid(), 0):
                raise BadBlockFile("the file belongs to another user")
            if status.st_size != expected:
                raise BadBlockFile(f"the file has {status.st_size} of {expected} bytes")
            data = np.empty(expected, np.uint8)
            _read_all(file, data.data)
        finally:
            os.close(file)
        header = BlockHeader.unpack(data[:HEADER_BYTES].tobytes())
        header.check(self._layout, key.identity, self._block_bytes)
        return data[HEADER_BYTES:], header.digest

    def _own(self, key: BlockKey) -> Path:
        assert self._slot is not None, "only a claimed folder has files"
        return self._in(self._slot, key)

    def _in(self, slot: Path, key: BlockKey) -> Path:
        name = f"{key.hash.hex()}-{key.identity.hex()}.kv"
        return slot / self._layout / key.tenant / name


def stored_key(key: BlockKey) -> BlockKey:
    """The key with the name of the tenant's folder in place of the tenant."""
    return BlockKey(key.hash, key.identity, tenant_folder(key.tenant))


def _check_private(folder: Path) -> None:
    """Raises PermissionError for a folder that other users can write to: they could change
    answers.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if status.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} can be written to by other users; run chmod 700 on it, or set another path"
        )


def _is_private(folder: Path) -> bool:
    try:
        _check_private(folder)
    except OSError:
        return False
    return True


def _folders(parent: Path, name: re.Pattern[str]) -> Iterator[Path]:
    with os.scandir(parent) as entries:
        found = [one for one in entries if name.fullmatch(one.name)]
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _files(tenant: Path) -> Iterator[FoundFile]:
    """The block files of one tenant's folder. Removes unfinished ones."""
    with os.scandir(tenant) as entries:
        for entry in entries:
            if entry.name.endswith(_PART):
                with contextlib.suppress(IsADirectoryError):
                    os.unlink(entry.path)
                continue
            match = _BLOCK.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            status = entry.stat(follow_symlinks=False)
            yield FoundFile(
                Path(entry.path),
                tenant.name,
                bytes.fromhex(match[1]) if len(match[1]) % 2 == 0 else b"",
                bytes.fromhex(match[2]),
                status.st_size,
                status.st_mtime_ns,
            )


def _write_all(file: int, header: memoryview, data: memoryview) -> None:
    """Writes everything, or raises OSError."""
    written = os.writev(file, [header, data])
    rest = written - len(header)
    if rest < 0:
        raise OSError("the disk took only a part of the header")
    while rest < len(data):
        rest += os.write(file, data[rest:])


def _read_all(file: int, data: memoryview) -> None:
    """Fills `data`. Raises BadBlockFile if the file ends earlier."""
    done = 0
    while done < len(data):
        got = os.readv(file, [data[done:]])
        if not got:
            raise BadBlockFile(f"the file ends after {done} of {len(data)} bytes")
        done += got
