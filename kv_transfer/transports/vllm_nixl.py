"""Transport between two vLLM engines: the commit names blocks in the memory of the sender's vLLM,
and the receiver's vLLM reads them with its own NixlConnector. No frame carries or names blocks.

NIXL neither authenticates nor encrypts; see `kv_transfer.transports.nixl`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import NoReturn, Protocol

from kv_transfer.lease import Lease
from kvrelay.errors import DataLoss
from kvrelay.wire.transfer import KvBlocks, KvOpen, VllmBlocks

NAME = "vllm-nixl"


class VllmReads(Protocol):
    """The receiver's vLLM, which reads blocks after the commit."""

    def expect(self, lease: Lease, blocks: VllmBlocks) -> Awaitable[int]:
        """Called once for a lease, just before its commit. Returns the number of blocks that were
        read, once the sequence has its KV. vLLM computes what it cannot read. Raises Cancelled if
        the sequence ends before.
        """
        ...


class VllmOutbound:
    """The sender's half."""

    frame_bytes = 2**20

    def announce(self, opening: KvOpen) -> KvOpen:
        """Returns the opening unchanged."""
        return opening

    def connect(self) -> None:
        """Does nothing: vLLM connects when it reads."""

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> NoReturn:
        """Raises AssertionError: the blocks are vLLM's."""
        raise AssertionError("vllm-nixl sends no blocks")


class VllmInbound:
    """The receiver's half."""

    def connect(self) -> None:
        """Does nothing: vLLM connects when it reads."""

    def source(self, frame: KvBlocks) -> NoReturn:
        """Raises DataLoss: the receiver's own memory holds no KV."""
        raise DataLoss(f"frame {frame.sequence} brings blocks, which {NAME} does not send")
