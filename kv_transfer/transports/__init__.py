"""How the bytes of a run of blocks travel. Everything else of a hand-off is the same for all transports.

A transport has two halves, each with a state of its own for one push. Their methods block: the caller runs
them in a worker thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.wire.transfer import KvBlocks, KvOpen


class Outbound(Protocol):
    """The sender's half."""

    def announce(self, opening: KvOpen) -> KvOpen:
        """The first frame, complete with what the receiver's half needs to know."""
        ...

    def connect(self) -> None:
        """Between the first frame and the first `pack`; waits for the receiver's `connect` if there is a need."""
        ...

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        """The frame that brings the KV of these blocks of the sender's arena, or says where it is."""
        ...


class Inbound(Protocol):
    """The receiver's half."""

    def connect(self) -> None:
        """Before the first `unpack`."""
        ...

    def unpack(self, frame: KvBlocks, blocks: Sequence[int]) -> None:
        """Writes the frame's KV to these blocks of the receiver's arena.

        The frame's `count` and `num_bytes` fit the blocks. Raises DataLoss when the bytes are not what was sent.
        """
        ...
