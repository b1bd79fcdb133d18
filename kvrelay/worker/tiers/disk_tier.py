"""A tier of files on a local disk."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

from kvrelay.clock import Clock
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierKind
from kvrelay.worker.tiers.block_file import BadBlockFile
from kvrelay.worker.tiers.disk_files import (
    Read,
    count_leading,
    open_folder,
    read_blocks,
    write_blocks,
)
from kvrelay.worker.tiers.disk_thread import DiskThread
from kvrelay.worker.tiers.doubts import Doubts
from kvrelay.worker.tiers.slot_folder import FolderLost, SlotFolder, file_bytes, stored_key
from kvrelay.worker.tiers.tier import StoredBlock, TierCounts
from kvrelay.worker.tiers.tier_errors import note_error, reason_of
from kvrelay.worker.tiers.tier_index import TierIndex

# Bytes of blocks that wait to be written. What comes beyond is dropped.
STAGING_BYTES = 32 * 2**20
# Bytes that one job writes.
_BATCH_BYTES = 8 * 2**20
# Files of one worker. Each takes an inode, and about 500 bytes of this process.
MAX_FILES = 2**18
# Reads that wait for the disk. Prompts beyond are computed.
_MAX_READS = 64
# Seconds without writing after an error; they double up to the second number.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Seconds after which the folders of other workers are looked for again.
_LOOK_AROUND_S = 5.0
# The removal of a file that fails is tried again after a pause. The pauses double, from the first
# one above to 17 minutes.
_MOST_TRIES = 12
# Blocks that were damaged, and blocks whose KV is in doubt. A failure gives up all blocks of its
# sequences: this is enough for several contexts of a million tokens.
_REFUSED_KEPT = 2**18
_CLOSE_S = 2.0
# Files that are entered into the index before other tasks have their turn.
_SLICE = 1024

log = get_logger("worker")


class DiskTier:
    """Blocks in files of a `SlotFolder`. All waiting for the disk is in two threads: one writes and
    removes, one reads. The index lives on the event loop.

    An error of the disk ends no request: the block is lost, and its KV is computed. After an error
    of writing the tier takes no blocks for some time, and reads go on.
    """

    kind: TierKind = "disk"

    def __init__(
        self,
        folder: SlotFolder,
        size_bytes: int,
        block_bytes: int,
        clock: Clock,
    ) -> None:
        self.size_bytes = size_bytes
        self.counts = TierCounts()
        # Set when the tier may have room again.
        self._drained = asyncio.Event()
        self._folder = folder
        self._block_bytes = block_bytes
        self._file_bytes = file_bytes(block_bytes)
        self._clock = clock
        self._index = TierIndex(min(size_bytes // self._file_bytes, MAX_FILES))
        # Files of other models or layouts, next to be removed first, with their bytes.
        self._foreign: deque[tuple[Path, int]] = deque()
        self._foreign_bytes = 0
        # Blocks that are not written yet, by identity.
        self._waiting: OrderedDict[bytes, StoredBlock] = OrderedDict()
        # Removals that are due: blocks, and files of other layouts.
        self._doomed: list[BlockKey | Path] = []
        # Files that could not be removed, and how often that was tried.
        self._tries: dict[BlockKey | Path, int] = {}
        # Blocks that were given up. Only files that were written here since are read.
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._doubts = Doubts()
        self._wake = asyncio.Event()
        self._open = False
        self._paused = False
        self._looked_at = float("-inf")
        self._writes = DiskThread("kv-tier-write")
        self._reads = DiskThread("kv-tier-read")

    @property
    def used_bytes(self) -> int:
        """Bytes of all block files in this worker's folder."""
        return len(self._index) * self._file_bytes + self._foreign_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of this layout."""
        return len(self._index)

    @property
    def has_room(self) -> bool:
        """See `Tier.has_room`."""
        return (
            self.works
            and self._index.capacity > 0
            and len(self._waiting) * self._block_bytes < STAGING_BYTES
        )

    @property
    def works(self) -> bool:
        """True if the folder is open and the last write did not fail."""
        return self._open and not self._paused

    @property
    def is_drained(self) -> bool:
        """True if there is nothing to write or to remove, or nothing can be."""
        return not (self._waiting or self._doomed or self._writes.pending) or not self.works

    async def wait_for_room(self) -> None:
        """See `Tier.wait_for_room`."""
        self._drained.clear()
        if not self.has_room:
            await self._drained.wait()

    def unsaved(self) -> tuple[StoredBlock, ...]:
        """See `Tier.unsaved`."""
        return ()

    def holds(self, key: BlockKey) -> bool:
        """True if the block is in this worker's folder, or waits to be written."""
        return key in self._index or key.identity in self._waiting

    def touch(self, key: BlockKey) -> bool:
        """See `Tier.touch`."""
        return self._index.touch(key) or key.identity in self._waiting

    def offer(self, block: StoredBlock) -> list[StoredBlock]:
        """See `Tier.offer`. Files that are given up go nowhere."""
        key = stored_key(block.key)
        if self.touch(key):
            return []
        if not self.has_room:
            self.counts.dropped += 1
            return []
        self._waiting[key.identity] = StoredBlock(key, block.copy)
        self._wake.set()
        return []

    async def probe(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading keys that this worker's folder or another's has. Waits for the
        disk only if other workers may have some.
        """
        here: list[tuple[BlockKey, bool]] = []
        for key in map(stored_key, keys):
            if not self._may_read(key):
                break
            here.append((key, self.holds(key)))
        first = next((count for count, (_, own) in enumerate(here) if not own), len(here))
        refresh = self._clock.now() - self._looked_at >= _LOOK_AROUND_S
        if first == len(here) or not (refresh or self._folder.others):
            return first
        if self._reads.pending >= _MAX_READS:
            return first
        self._looked_at = self._clock.now() if refresh else self._looked_at
        try:
            return first + await self._reads.run(
                partial(count_leading, self._folder, here[first:], refresh=refresh)
            )
        except OSError as error:
            # `run` reports a path that is not there.
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                note_error(self.counts, self.kind, "probe", reason_of(error))
            return first

    async def read(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """See `Tier.read`."""
        if self._reads.pending >= _MAX_READS:
            return []
        stored, index = list(takewhile(self._may_read, map(stored_key, keys))), self._index
        if not stored:
            return []
        wanted = [(key, self._waiting.get(key.identity), key in self._index) for key in stored]
        began = self._clock.now()
        with self._doubts.meanwhile() as doubted:
            found = await self._reads.run(partial(read_blocks, self._folder, wanted))
        if self._index is not index:
            # The blocks may be of a folder that was claimed meanwhile.
            return []
        usable = list(takewhile(lambda key: key.identity not in doubted, stored))
        if len(usable) < len(stored):
            found = Read(found.blocks[: len(usable)])
        if found.blocks:
            num_bytes = len(found.blocks) * self._block_bytes
            self.counts.read(num_bytes, self._clock.now() - began)
        self._after_read(found)
        return found.blocks

    def _may_read(self, key: BlockKey) -> bool:
        """False if the block was given up and not stored here since."""
        return key.identity not in self._refused or self.holds(key)

    def _after_read(self, found: Read) -> None:
        for block in found.blocks:
            self._index.touch(block.key)
        if found.error is None:
            return
        if found.failed is None:
            assert isinstance(found.error, OSError), "a bad file is one of a block"
            note_error(self.counts, self.kind, "read", reason_of(found.error))
            # Otherwise a folder is being opened already.
            if isinstance(found.error, FolderLost) and self._open:
                self._lose_folder()
                self._wake.set()
        elif isinstance(found.error, FileNotFoundError):
            # Removed by somebody, or evicted meanwhile.
            self._remove(found.failed)
        elif isinstance(found.error, BadBlockFile):
            note_error(self.counts, self.kind, "read", str(found.error))
            self._give_up(found.failed)
        else:
            note_error(self.counts, self.kind, "read", reason_of(found.error))
            # Otherwise each prompt would end its prefix here.
            self._give_up(found.failed)

    def reject(self, key: BlockKey, reason: str) -> None:
        """See `Tier.reject`."""
        note_error(self.counts, self.kind, "read", reason)
        self._give_up(stored_key(key))

    def forget(self, key: BlockKey) -> None:
        """See `Tier.forget`. Another worker's file of the block is not read any more."""
        self._give_up(stored_key(key))

    def _give_up(self, key: BlockKey) -> None:
        """Removes the block's file if it is in this worker's folder. No other file of the block is
        read any more: another worker's, or one of a disk that is away now.
        """
        self._doubts.note(key.identity)
        self._refused[key.identity] = None
        self._refused.move_to_end(key.identity)
        if len(self._refused) > _REFUSED_KEPT:
            self._refused.popitem(last=False)
        waited = self._waiting.pop(key.identity, None) is not None
        if self._remove(key) or waited:
            self._doomed.append(key)
            self._wake.set()

    def _remove(self, key: BlockKey) -> bool:
        return self._index.remove(key) is not None

    async def run(self) -> None:
        """Opens the folder, then writes what is offered, until cancelled."""
        pause = _PAUSE_S
        while True:
            try:
                worked = await (self._write() if self._open else self._try_to_open())
            # A tier only saves time. Without it the worker serves on.
            except Exception as error:
                log.exception("kv_tier_failed", tier=self.kind)
                note_error(self.counts, self.kind, "run", repr(error))
                worked = False
            self._drained.set()
            if worked:
                pause = _PAUSE_S
                continue
            self._paused = True
            # What waits is old when the disk works again.
            self.counts.dropped += len(self._waiting)
            self._waiting.clear()
            self._drained.set()
            await asyncio.sleep(pause)
            self._paused = False
            self._drained.set()
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _try_to_open(self) -> bool:
        try:
            own, foreign = await self._writes.run(partial(open_folder, self._folder))
        except OSError as error:
            where = error.filename or self._folder.path
            note_error(self.counts, self.kind, "open", f"{where}: {reason_of(error)}")
            return False
        wrong = [one for one in own if not self._folder.has_expected_size(one)]
        bad = {one.path for one in wrong}
        if wrong:
            note_error(self.counts, self.kind, "scan", f"{len(wrong)} files have the wrong length")
        for one in (*foreign, *wrong):
            self._foreign.append((one.path, one.size))
            self._foreign_bytes += one.size
        for count, one in enumerate(one for one in own if one.path not in bad):
            if count % _SLICE == 0:
                await asyncio.sleep(0)
            self._found(BlockKey(one.hash, one.identity, one.tenant))
        self._open = True
        # Removes what is too much.
        self._wake.set()
        if not self._index.capacity:
            note_error(
                self.counts,
                self.kind,
                "open",
                f"a block takes {self._file_bytes} bytes, and the tier has {self.size_bytes}",
            )
        log.info(
            "kv_tier_opened",
            tier=self.kind,
            folder=str(self._folder.slot),
            blocks=len(self._index),
            foreign_files=len(self._foreign),
        )
        return True

    def _found(self, key: BlockKey) -> None:
        """Adds a file that was there when the folder was opened, unless its block was given up. The
        files come least recently used first.
        """
        if key.identity in self._refused:
            self._doomed.append(key)
            return
        self._doomed += self._index.make_room()
        if self._index.capacity:
            self._index.add(key)

    async def _write(self) -> bool:
        """Waits for work and does a batch of it. Returns False if the disk failed."""
        await self._wake.wait()
        self._wake.clear()
        most = max(1, min(_BATCH_BYTES // self._block_bytes, self._index.capacity))
        batch = list(self._waiting.values())[:most]
        gone = self._make_room(len(batch))
        if not (batch or gone):
            return True
        began = self._clock.now()
        refused = {one.key.identity for one in batch} & self._refused.keys()
        done = await self._writes.run(partial(write_blocks, self._folder, gone, batch, refused))
        if not self._open:
            # A read has found meanwhile that the folder is lost.
            self.counts.dropped += len(batch) - done.skipped
            self._forget_waiting(batch)
            return True
        self._doomed = done.not_removed + self._doomed
        if done.blocks:
            num_bytes = len(done.blocks) * self._block_bytes
            self.counts.written(num_bytes, self._clock.now() - began)
        for block in done.blocks:
            self._stored(block)
        if done.error is not None:
            self.counts.dropped += len(batch) - len(done.blocks) - done.skipped
            note_error(self.counts, self.kind, "write", reason_of(done.error))
            if isinstance(done.error, FolderLost):
                self._lose_folder()
        self._forget_waiting(batch)
        self._try_later(gone, done.stuck)
        if self._waiting or self._doomed:
            self._wake.set()
        return done.error is None

    def _try_later(self, gone: Sequence[BlockKey | Path], stuck: Sequence[BlockKey | Path]) -> None:
        """Removes the files of `stuck` after a pause, which is longer each time. Other workers read
        a file until it is gone.
        """
        tries = {one: self._tries.pop(one, 0) + 1 for one in gone}
        for one in stuck:
            if tries[one] < _MOST_TRIES:
                self._tries[one] = tries[one]
                pause = _PAUSE_S * 2 ** (tries[one] - 1)
                asyncio.get_running_loop().call_later(pause, self._try_again, one)
            else:
                note_error(self.counts, self.kind, "remove", "a file cannot be removed")

    def _try_again(self, one: BlockKey | Path) -> None:
        if one in self._tries:
            self._doomed.append(one)
            self._wake.set()

    def _lose_folder(self) -> None:
        """Forgets the files. `run` claims a folder again, which may be the same one: a disk that
        was away is back.
        """
        self._open = False
        self._index = TierIndex(self._index.capacity)
        self._foreign.clear()
        self._foreign_bytes = 0
        self._doomed.clear()
        self._tries.clear()

    def _make_room(self, blocks: int) -> list[BlockKey | Path]:
        """What has to be removed so that `blocks` more fit: blocks, and files of other layouts."""
        # A block that was stored again has a new file of the same name.
        gone = [one for one in self._doomed if isinstance(one, Path) or one not in self._index]
        self._doomed = []
        wanted = blocks * self._file_bytes
        while self._foreign and self.used_bytes + wanted > self.size_bytes:
            path, size = self._foreign.popleft()
            self._foreign_bytes -= size
            gone.append(path)
        evicted = self._index.make_room(blocks)
        self.counts.evicted += len(evicted)
        return gone + evicted

    def _forget_waiting(self, batch: Sequence[StoredBlock]) -> None:
        """Removes the blocks. Blocks that were offered in their place stay."""
        for block in batch:
            if self._waiting.get(block.key.identity) is block:
                del self._waiting[block.key.identity]

    def _stored(self, block: StoredBlock) -> None:
        key = block.key
        if self._waiting.get(key.identity) is not block:
            # Given up while it was written. Other KV for it may wait.
            self._doomed.append(key)
            return
        self._index.add(key)
        self._tries.pop(key, None)
        self.counts.stored += 1

    async def close(self) -> None:
        """Ends the threads. Call it when `run` has ended. A thread that a disk holds up is left
        behind, with the lock of the folder that it may still write to.
        """
        self._reads.close()
        self._writes.close()
        with suppress(asyncio.CancelledError):
            if await asyncio.to_thread(self._writes.join, _CLOSE_S):
                self._folder.release()
            else:
                log.warning("kv_tier_hangs", tier=self.kind, folder=str(self._folder.slot))
