"""What a push has brought, checked against what its lease is for. Pure."""

from __future__ import annotations

import xxhash

from kv_transfer.lease import Lease
from kvrelay.errors import DataLoss
from kvrelay.types import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvCommit


class Arrivals:
    """Each frame in its turn, each block of the lease's writable ones once, and at the end all of them.

    Whatever is wrong raises DataLoss.
    """

    def __init__(self, lease: Lease, layout: KvLayout) -> None:
        self._lease = lease
        self._layout = layout
        self._indices: set[int] = set()  # into the lease's blocks
        self._frames = 0
        self._digest = xxhash.xxh3_64()

    def check(self, frame: KvBlocks) -> tuple[int, ...]:
        """The block numbers in this arena that the frame's KV belongs to."""
        lease, end = self._lease, frame.first + frame.count
        if frame.sequence != self._frames:
            raise DataLoss(f"frame {frame.sequence} came where frame {self._frames} was due")
        if frame.count < 1 or frame.first < lease.cached_blocks or end > len(lease.blocks):
            raise DataLoss(
                f"frame {frame.sequence} brings blocks {frame.first} to {end - 1} of the lease; "
                f"it takes {lease.cached_blocks} to {len(lease.blocks) - 1}"
            )
        if not self._indices.isdisjoint(range(frame.first, end)):
            raise DataLoss(f"frame {frame.sequence} brings blocks that another one has brought")
        if frame.num_bytes != frame.count * self._layout.block_bytes:
            raise DataLoss(f"frame {frame.sequence} claims {frame.num_bytes} bytes for {frame.count} blocks")
        return lease.blocks[frame.first : end]

    def add(self, frame: KvBlocks) -> None:
        """The frame's KV is in its blocks."""
        self._indices.update(range(frame.first, frame.first + frame.count))
        self._frames += 1
        self._digest.update(frame.digest.to_bytes(8, "little"))

    def check_complete(self, commit: KvCommit) -> None:
        num_blocks = len(self._lease.blocks)
        if missing := len(self._lease.writable) - len(self._indices):
            raise DataLoss(f"{missing} of {len(self._lease.writable)} blocks are missing at the commit")
        if commit.frames != self._frames or commit.digest != self._digest.intdigest():
            raise DataLoss(f"the commit is of {commit.frames} frames, but not of the {self._frames} that came")
        if self._layout.blocks_for(commit.num_tokens) != num_blocks:
            raise DataLoss(f"{commit.num_tokens} tokens do not make the lease's {num_blocks} blocks")
        if commit.first_token < 0:
            raise DataLoss(f"first token {commit.first_token} is no token id")
