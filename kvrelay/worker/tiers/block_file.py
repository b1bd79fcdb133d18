"""The format of a record of one KV block: a header of fixed size, then the block's bytes. A file of
a disk tier holds one record, and a frame to or from a store one or more.

The header says whose block it is: layout, identity, length. A reader compares each with what it
asked for, so a file of another model, another place or another length is never taken for the
block. One digest covers the header and one the block's bytes. The digests detect accidents, not
forgeries: who can write to the folder can change answers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from kvrelay.types.kv_block import IDENTITY_BYTES

MAGIC = b"kvrelay\n"
VERSION = 1
_LAYOUT_BYTES = 32
# Magic, version, bytes of the block, digest of the block, layout, identity. The padding makes the
# header 128 bytes long, so that the block's bytes are aligned in memory.
_FIELDS = struct.Struct(f"<8sI4xQQ{_LAYOUT_BYTES}s{IDENTITY_BYTES}s24x")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _DIGEST.size


class BadBlockFile(Exception):
    """The record is not that of the block that was asked for. The text says why."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a file says of its block."""

    # The layout hash, which also stands for the model.
    layout: str
    identity: bytes
    block_bytes: int
    # XXH3-64 of the block's bytes, region after region.
    digest: int

    def pack(self) -> bytes:
        """The header's bytes."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.block_bytes,
            self.digest,
            self.layout.encode(),
            self.identity,
        )
        return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, data: bytes) -> BlockHeader:
        """Parses the first HEADER_BYTES of a file. Raises BadBlockFile."""
        if len(data) != HEADER_BYTES:
            raise BadBlockFile(f"the header has {len(data)} of {HEADER_BYTES} bytes")
        fields = data[: _FIELDS.size]
        magic, version, block_bytes, digest, layout, identity = _FIELDS.unpack(fields)
        if magic != MAGIC:
            raise BadBlockFile("the file is not a KV block")
        if _DIGEST.unpack(data[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
            raise BadBlockFile("the header is damaged")
        if version != VERSION:
            raise BadBlockFile(f"the format has version {version}; this worker reads {VERSION}")
        text = layout.rstrip(b"\0").decode("ascii", errors="replace")
        return cls(text, identity, block_bytes, digest)

    def check(self, layout: str, identity: bytes, block_bytes: int) -> None:
        """Raises BadBlockFile unless this is the block that was asked for."""
        if self.layout != layout:
            raise BadBlockFile(f"the block has layout {self.layout!r:.40}, not {layout!r}")
        if self.identity != identity:
            raise BadBlockFile("the block is of other tokens")
        if self.block_bytes != block_bytes:
            raise BadBlockFile(f"the block has {self.block_bytes} bytes, not {block_bytes}")


class Records:
    """The records in frames, of which a large one goes on from frame to frame."""

    def __init__(self, check: Callable[[BlockHeader], None]) -> None:
        """check: raises an error for a header that is not the next block's, before memory is taken
        for its block.
        """
        self._check = check
        self._header: BlockHeader | None = None
        # The record that is not whole yet.
        self._begun = bytearray()

    @property
    def is_whole(self) -> bool:
        """True between two records."""
        return self._header is None

    def of(self, data: memoryview) -> Iterator[tuple[BlockHeader, memoryview]]:
        """The records that end in the next frame's bytes. Those within it are views. Raises
        BadBlockFile, and what `check` raises.
        """
        while data:
            header = self._header
            if header is None:
                header = BlockHeader.unpack(data[:HEADER_BYTES].tobytes())
                self._check(header)
            missing = HEADER_BYTES + header.block_bytes - len(self._begun)
            part, data = data[:missing], data[missing:]
            if len(part) < missing:
                self._header = header
                self._begun += part
            elif self._header is None:
                yield header, part
            else:
                self._begun += part
                whole = memoryview(self._begun)
                self._header, self._begun = None, bytearray()
                yield header, whole
