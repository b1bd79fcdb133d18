"""Transport within one host: the receiver maps the sender's arena read-only."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kv_transfer.blocks.block_copy import HostBytes
from kv_transfer.transports.named import NamedInbound
from kvrelay.errors import Unimplemented
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import SharedSegment


class SegmentCache:
    """Mapped arenas of senders, kept from their first push until the sender ends."""

    def __init__(self) -> None:
        self._mapped: dict[SharedSegment, HostBytes] = {}

    def __len__(self) -> int:
        """Number of mapped arenas."""
        return len(self._mapped)

    @contextmanager
    def lend(self, segment: SharedSegment, layout: KvLayout) -> Iterator[NamedInbound]:
        """The receiving half for one push. `layout` is that of the sender's arena. Raises
        Unimplemented if the arena cannot be read from here.
        """
        if segment not in self._mapped:
            self._mapped[segment] = _map(segment)
        try:
            yield NamedInbound(self._mapped[segment], layout)
        finally:
            self.drop_dead()

    def drop_dead(self) -> None:
        """Unmaps the arenas of ended senders, whose memory the mapping would keep."""
        for segment in list(self._mapped):
            if not _is_memory_file(_path(segment), segment):
                del self._mapped[segment]


def _path(segment: SharedSegment) -> str:
    return f"/proc/{segment.pid}/fd/{segment.fd}"


def _is_memory_file(path: str, segment: SharedSegment) -> bool:
    """True if `path` leads to the memory file that has the segment's nonce."""
    try:
        return os.readlink(path).removesuffix(" (deleted)") == f"/memfd:kvrelay-{segment.nonce:x}"
    except OSError:
        return False


def _map(segment: SharedSegment) -> HostBytes:
    try:
        # The peer's path may name a pipe. O_NONBLOCK keeps the open from waiting for it.
        fd = os.open(_path(segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unimplemented(
            f"cannot open {_path(segment)}: {error.strerror}; sender and receiver must run on "
            "one host as one user"
        ) from error
    try:
        # Checks the opened file, since the path may lead elsewhere later.
        if (
            not _is_memory_file(f"/proc/self/fd/{fd}", segment)
            or os.fstat(fd).st_size != segment.size
        ):
            raise Unimplemented(
                f"{_path(segment)} does not contain arena {segment.nonce:x} of {segment.size} bytes"
            )
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise Unimplemented(f"{_path(segment)} is not sealed against shrinking by its owner")
        return np.frombuffer(mmap.mmap(fd, segment.size, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(fd)
