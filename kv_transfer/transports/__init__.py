"""How the bytes of a run of blocks travel. Everything else of a hand-off is the same for all
transports.

A transport has two halves, each with a state of its own for one push. Their methods block: the
caller runs them in a worker thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_transfer.block_copy import HostBytes
from kv_transfer.plan import Layers, Places
from kvrelay.types import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen


class Outbound(Protocol):
    """The sender's half."""

    # Of KV that a frame should bring at most; a single block that is larger goes alone
    frame_bytes: int

    def announce(self, opening: KvOpen) -> KvOpen:
        """The first frame, complete with what the receiver's half needs to know."""
        ...

    def connect(self) -> None:
        """Between the first frame and the first `pack`; waits for the receiver's `connect` if there
        is a need.
        """
        ...

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        """The frame that brings the KV of these blocks of the sender's arena, or says where it
        is.
        """
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV of a frame lies now, in the receiver's reach: blocks of a memory on the host, or
    on its GPU.
    """

    data: HostBytes | torch.Tensor  # of a GPU
    places: Places
    blocks: Sequence[int]


class Inbound(Protocol):
    """The receiver's half."""

    def connect(self) -> None:
        """Before the first `source`."""
        ...

    def source(self, frame: KvBlocks) -> Source:
        """The frame's KV, until the next call. Its `count`, layers and `num_bytes` fit each other.

        Raises DataLoss when it does not bring what it says.
        """
        ...


def source_of(payload: torch.Tensor, frame: KvBlocks, layout: KvLayout) -> Source:
    """`payload` has the bytes of the frame's blocks, which are of this layout, in plan order; it
    may be longer.
    """
    places = Places.of_payload(layout, frame.count, layers_of(frame))
    return Source(payload.numpy() if payload.is_cpu else payload, places, range(frame.count))


def layers_of(frame: KvBlocks) -> Layers:
    return Layers(frame.first_layer, frame.num_layers)
