"""Block files of a `SlotFolder` with known content. Imports little, for processes that are killed
often.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import xxhash

from kvrelay.types.kv_block import BlockKey
from kvrelay.worker.tiers.slot_folder import HostBytes, SlotFolder, stored_key

LAYOUT = "0123456789abcdef"
BYTES = 640


def key(number: int, tenant: str = "a") -> BlockKey:
    identity = hashlib.sha256(b"%d" % number).digest()
    return stored_key(BlockKey(identity[:16], identity, tenant))


def content(number: int, size: int = BYTES) -> HostBytes:
    return np.frombuffer(random.Random(number).randbytes(size), np.uint8)


def digest(data: HostBytes) -> int:
    return xxhash.xxh3_64_intdigest(data.tobytes())


def folder(path: Path, layout: str = LAYOUT, size: int = BYTES) -> SlotFolder:
    made = SlotFolder(path, layout, size)
    made.claim()
    return made


def write(to: SlotFolder, number: int, tenant: str = "a", size: int = BYTES) -> None:
    data = content(number, size)
    to.write(key(number, tenant), data, digest(data))


def sound(of: SlotFolder, number: int, *, own: bool = True) -> bool:
    """Whether the block comes back as it was."""
    data, expected = of.read(key(number), own=own)
    return digest(data) == expected and data.tobytes() == content(number).tobytes()
