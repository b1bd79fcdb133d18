"""Sender and receiver on one host: the receiver maps the sender's arena, for reading only."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kv_transfer.block_copy import HostBytes
from kv_transfer.transports.named import NamedInbound
from kvrelay.errors import Unimplemented
from kvrelay.types import KvLayout
from kvrelay.wire.transfer import SharedSegment


class SegmentCache:
    """Senders' arenas, mapped at their first push and kept for the next ones while the sender
    lives.
    """

    def __init__(self) -> None:
        self._mapped: dict[SharedSegment, HostBytes] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    @contextmanager
    def lend(self, segment: SharedSegment, layout: KvLayout) -> Iterator[NamedInbound]:
        """For one push. `layout` is that of the sender's arena. Raises Unimplemented if it cannot
        be read from here.
        """
        if segment not in self._mapped:
            self._mapped[segment] = _map(segment)
        try:
            yield NamedInbound(self._mapped[segment], layout)
        finally:
            self._drop_dead()

    def _drop_dead(self) -> None:
        """A mapping would keep the memory of a sender that has died."""
        for segment in list(self._mapped):
            if not _is_memory_file(_path(segment), segment):
                del self._mapped[segment]


def _path(segment: SharedSegment) -> str:
    return f"/proc/{segment.pid}/fd/{segment.fd}"


def _is_memory_file(path: str, segment: SharedSegment) -> bool:
    """Whether `path` leads to the memory file that bears the segment's nonce."""
    try:
        return os.readlink(path).removesuffix(" (deleted)") == f"/memfd:kvrelay-{segment.nonce:x}"
    except OSError:
        return False


def _map(segment: SharedSegment) -> HostBytes:
    try:
        # What the peer names may be a pipe, which is not waited for.
        fd = os.open(_path(segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unimplemented(
            f"cannot open {_path(segment)}: {error.strerror}; is it on this host, of this user?"
        ) from error
    try:
        # The check is of what was opened, not of what the path may lead to next.
        if (
            not _is_memory_file(f"/proc/self/fd/{fd}", segment)
            or os.fstat(fd).st_size != segment.size
        ):
            raise Unimplemented(
                f"{_path(segment)} is not arena {segment.nonce:x} of {segment.size} bytes"
            )
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise Unimplemented(
                f"{_path(segment)} may shrink while it is read; its owner must seal it"
            )
        return np.frombuffer(mmap.mmap(fd, segment.size, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(fd)
