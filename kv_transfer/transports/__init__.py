"""Transports for the bytes of a run of blocks. The rest of a hand-off is the same for all
transports.

A transport has two halves, each with its own state for one push. Their methods block: the caller
runs them in a worker thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_transfer.blocks.block_copy import HostBytes
from kv_transfer.blocks.plan import Layers, Places
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen


class Outbound(Protocol):
    """The sender's half."""

    # Target size of a frame's KV in bytes. A larger block travels in a frame of its own.
    frame_bytes: int

    def announce(self, opening: KvOpen) -> KvOpen:
        """Completes the first frame with what the receiver's half needs."""
        ...

    def connect(self) -> None:
        """Called between the first frame and the first `pack`. Waits for the receiver's `connect`
        if necessary.
        """
        ...

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        """The frame that carries or locates the KV of these blocks of the sender's arena."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """The current location of a frame's KV on the receiver: blocks of a memory on the host or on
    its GPU.
    """

    # A tensor if it is on a GPU.
    data: HostBytes | torch.Tensor
    places: Places
    blocks: Sequence[int]


class Inbound(Protocol):
    """The receiver's half."""

    def connect(self) -> None:
        """Called before the first `source`."""
        ...

    def source(self, frame: KvBlocks) -> Source:
        """The frame's KV, valid until the next call. The caller has checked `count`, layers and
        `num_bytes` against each other.

        Raises DataLoss if the KV does not match the frame.
        """
        ...


def source_of(payload: torch.Tensor, frame: KvBlocks, layout: KvLayout) -> Source:
    """The source in `payload`, which holds the bytes of the frame's blocks in plan order and in
    this layout. `payload` may be longer.
    """
    places = Places.of_payload(layout, frame.count, layers_of(frame))
    return Source(payload.numpy() if payload.is_cpu else payload, places, range(frame.count))


def layers_of(frame: KvBlocks) -> Layers:
    """The layers that the frame brings."""
    return Layers(frame.first_layer, frame.num_layers)
