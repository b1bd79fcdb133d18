"""Gives memory of KV blocks back to the system, in a thread of its own."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Collection, Sequence
from itertools import accumulate, islice

from kvrelay.types.kv_layout import KvLayout

log = logging.getLogger(__name__)

# Modes of fallocate(2): a hole in a file that keeps its size.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# Pages that are given back at a time, about a millisecond. A block that is taken again may have to
# wait for them.
_PAGES = 1024


class VacatedMemory:
    """Blocks of a memory file whose content is over, by part: the windowed layers of a block, and
    the others.

    `give_up` and `take` return at once: a thread gives the pages back, about a microsecond each. A
    part that is taken again before that keeps its pages. Only whole pages are given back, see
    `KvLayout.lasting_bytes`. If the system refuses a page, the log says so and no more are given
    back.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, fd: int) -> None:
        self._fd = fd
        sizes = layout.region_block_bytes
        starts = [num_blocks * start for start in accumulate(sizes, initial=0)]
        windowed = frozenset(layout.windowed_regions)
        # Start and bytes of a block of the regions of each part: windowed, or not.
        self._regions = {
            part: [
                (starts[one], sizes[one])
                for one in range(len(sizes))
                if (one in windowed) == part and sizes[one]
            ]
            for part in (False, True)
        }
        self._slice = max(1, _PAGES * mmap.PAGESIZE // layout.block_bytes)
        self._waiting: dict[bool, dict[int, None]] = {False: {}, True: {}}
        # Blocks whose part is being given back.
        self._going: dict[bool, frozenset[int]] = {False: frozenset(), True: frozenset()}
        # Guards both.
        self._lock = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def give_up(self, blocks: Sequence[int], *, only_windowed: bool = False) -> None:
        """The content of the blocks is over: of windowed layers only, or of all."""
        with self._lock:
            for part in (True,) if only_windowed else (True, False):
                self._waiting[part].update(dict.fromkeys(blocks))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vacate", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def take(self, blocks: Collection[int], *, windowed: bool) -> None:
        """Content comes to a part of the blocks: their pages stay from now on."""
        with self._lock:
            waiting = self._waiting[windowed]
            for block in blocks:
                waiting.pop(block, None)
            while not self._going[windowed].isdisjoint(blocks):
                self._lock.wait()

    def settle(self) -> None:
        """Returns when nothing waits any more."""
        with self._lock:
            while not self._closed and (any(self._waiting.values()) or any(self._going.values())):
                self._lock.wait()

    def close(self) -> None:
        """Ends the thread. What waits stays as it is."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not any(self._waiting.values()):
                    self._lock.wait()
                if self._closed:
                    return
                part = not self._waiting[False]
                blocks = sorted(islice(self._waiting[part], self._slice))
                for block in blocks:
                    del self._waiting[part][block]
                self._going[part] = frozenset(blocks)
            error = self._give_back(blocks, part)
            with self._lock:
                self._going[part] = frozenset()
                self._closed = self._closed or error != 0
                self._lock.notify_all()
            if error:
                log.error("kv_memory_not_given_back: %s", os.strerror(error))

    def _give_back(self, blocks: Sequence[int], part: bool) -> int:
        """Returns the error number of the system, or 0."""
        runs = _runs(blocks)
        for start, size in self._regions[part]:
            for first, end in runs:
                begin = _page(start + first * size + mmap.PAGESIZE - 1)
                length = _page(start + end * size) - begin
                if length > 0 and (error := _punch(self._fd, begin, length)):
                    return error
        return 0


def _punch(fd: int, offset: int, length: int) -> int:
    """Makes a hole in a file. Returns the error number, or 0. Other threads run meanwhile."""
    done = _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)
    return ctypes.get_errno() if done else 0


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """The runs [first, end) of adjacent blocks, given in ascending order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        first = block
        if runs and runs[-1][1] == block:
            first, _ = runs.pop()
        runs.append((first, block + 1))
    return runs


def _page(offset: int) -> int:
    """The page boundary at or before `offset`."""
    return offset // mmap.PAGESIZE * mmap.PAGESIZE
