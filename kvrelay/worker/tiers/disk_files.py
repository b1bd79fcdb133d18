"""The jobs of a disk tier's threads: functions over a `SlotFolder`, without state of their own."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.blocks.single_blocks import BlockCopy
from kvrelay.types.kv_block import BlockKey
from kvrelay.worker.tiers.block_file import BadBlockFile
from kvrelay.worker.tiers.slot_folder import FoundFile, SlotFolder
from kvrelay.worker.tiers.tier import StoredBlock


@dataclass(slots=True)
class Written:
    """What a job of the writing thread did before it ended or failed."""

    blocks: list[StoredBlock] = field(default_factory=list)
    # Blocks that another worker's folder has already, or whose name is that of a folder.
    skipped: int = 0
    error: OSError | None = None
    # What was to be removed when the error came.
    not_removed: list[BlockKey | Path] = field(default_factory=list)
    # What the disk refused to remove.
    stuck: list[BlockKey | Path] = field(default_factory=list)


@dataclass(slots=True)
class Read:
    """What a job of the reading thread found before it ended or failed."""

    blocks: list[StoredBlock] = field(default_factory=list)
    # The key that failed.
    failed: BlockKey | None = None
    # The file is missing, is not of this block, or cannot be read.
    error: BadBlockFile | OSError | None = None


def open_folder(folder: SlotFolder) -> tuple[list[FoundFile], list[FoundFile]]:
    """Claims a folder, and returns its files; see `SlotFolder.scan`. Raises OSError, and then has
    no claim.
    """
    folder.claim()
    try:
        return folder.scan()
    except OSError:
        folder.release()
        raise


def write_blocks(
    folder: SlotFolder,
    gone: Sequence[BlockKey | Path],
    blocks: Sequence[StoredBlock],
    refused: Set[bytes],
) -> Written:
    """Removes the files of `gone`, then, if all are gone, writes blocks until one fails. A block
    that another worker's folder has is not written, unless its identity is among those `refused`.
    """
    done = Written()
    try:
        folder.check_claim()
    except OSError as error:
        done.error, done.not_removed = error, list(gone)
        return done
    for one in gone:
        try:
            folder.remove_file(one) if isinstance(one, Path) else folder.remove(one)
        except OSError as error:
            done.error = done.error or error
            done.stuck.append(one)
    if done.error is not None:
        return done
    try:
        for block in blocks:
            if block.key.identity not in refused and folder.holds_elsewhere(block.key):
                done.skipped += 1
                continue
            try:
                folder.write(block.key, block.copy.data, block.copy.digest)
            except IsADirectoryError:
                done.skipped += 1
                continue
            done.blocks.append(block)
    except OSError as error:
        done.error = error
    return done


def read_blocks(
    folder: SlotFolder, wanted: Sequence[tuple[BlockKey, StoredBlock | None, bool]]
) -> Read:
    """Reads blocks until one fails. Each is (key, the block if it is in memory, whether it is in
    this worker's own folder).
    """
    found = Read()
    # The number of blocks before the first of the own folder.
    first: int | None = None
    for key, block, own in wanted:
        if block is None:
            try:
                data, digest = folder.read(key, own=own)
            except (BadBlockFile, OSError) as error:
                found.failed, found.error = key, error
                break
            if own and first is None:
                first = len(found.blocks)
            block = StoredBlock(key, BlockCopy(data, digest))
        found.blocks.append(block)
    if first is not None:
        try:
            # A disk that was away may be back, with older files in place of those in the index.
            folder.check_claim()
        except OSError as error:
            # It is not about a block.
            found.failed, found.error = None, error
            del found.blocks[first:]
    return found


def count_leading(
    folder: SlotFolder, keys: Sequence[tuple[BlockKey, bool]], *, refresh: bool
) -> int:
    """The number of leading keys that are here or in another worker's folder. Each key comes with
    whether it is here. `refresh`: looks for new folders first. Raises OSError.
    """
    if refresh:
        folder.look_around()
    for count, (key, here) in enumerate(keys):
        if not here and not folder.holds_elsewhere(key):
            return count
    return len(keys)
