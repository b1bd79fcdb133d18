"""The frame validator: checks the frames of a push against its lease. Pure."""

from __future__ import annotations

import math

import xxhash

from kv_transfer.blocks.plan import Layers, Places
from kv_transfer.lease import Lease
from kv_transfer.vllm_blocks_check import check_vllm_blocks
from kvrelay.errors import DataLoss
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvCommit, commit_digest


class FrameValidator:
    """Checks that frames come in order, that they bring each layer of each missing block once and
    in order, and that none is missing at the commit. Windowed layers are missing only from the
    lease's first block that needs them.

    Blocks are counted in the sender's layout, `theirs`. Every violation raises DataLoss.
    """

    def __init__(self, lease: Lease, ours: KvLayout, theirs: KvLayout) -> None:
        self._lease = lease
        self._ours = ours
        self._theirs = theirs
        self._first = lease.cached_blocks * ours.block_size // theirs.block_size
        self._end = math.ceil(len(lease.blocks) * ours.block_size / theirs.block_size)
        # Windowed layers of earlier blocks are not sent.
        self._windows_from = theirs.first_block(lease.num_tokens)
        # Block -> the layer after the last that has arrived.
        self._layers: dict[int, int] = {}
        self._frames = 0
        self._digest = xxhash.xxh3_64()

    def check(self, frame: KvBlocks) -> None:
        """Raises DataLoss unless the frame may come now."""
        if frame.sequence != self._frames:
            raise DataLoss(f"received frame {frame.sequence}, and expected frame {self._frames}")
        self._check_blocks(frame)
        self._check_layers(frame)
        layers = Layers(frame.first_layer, frame.num_layers)
        if frame.num_bytes != frame.count * Places.of_payload(self._theirs, 1, layers).block_bytes:
            raise DataLoss(
                f"frame {frame.sequence} declares {frame.num_bytes} bytes for {frame.count} blocks"
            )

    def _check_blocks(self, frame: KvBlocks) -> None:
        end = frame.first + frame.count
        if frame.count < 1 or frame.first < self._first or end > self._end:
            raise DataLoss(
                f"frame {frame.sequence} contains blocks {frame.first} to {end - 1} of the "
                f"sequence; the lease covers {self._first} to {self._end - 1}"
            )

    def _check_layers(self, frame: KvBlocks) -> None:
        first, num_layers = frame.first_layer, len(self._theirs.layers)
        if not 0 <= first < first + frame.num_layers <= num_layers:
            raise DataLoss(
                f"frame {frame.sequence} contains {frame.num_layers} layers from layer {first} "
                f"on; the model has {num_layers} layers"
            )
        blocks = range(frame.first, frame.first + frame.count)
        due = {self._next_layer(block) for block in blocks}
        end = first + frame.num_layers
        if frame.first < self._windows_from and any(self._theirs.windows[first:end]):
            raise DataLoss(
                f"frame {frame.sequence} contains windowed layers of block {frame.first}; the "
                f"lease takes them from block {self._windows_from} on"
            )
        if due != {frame.first_layer}:
            raise DataLoss(
                f"frame {frame.sequence} starts at layer {frame.first_layer}, and expected "
                f"layer {max(due)}; a frame is missing or repeated"
            )

    def _next_layer(self, block: int) -> int:
        """The next layer of the block that is due; the number of layers if there is none."""
        layer = self._layers.get(block, 0)
        return layer if block >= self._windows_from else self._theirs.kept_from(layer)

    def add(self, frame: KvBlocks) -> None:
        """Records that the frame's KV has been written to its blocks."""
        for block in range(frame.first, frame.first + frame.count):
            self._layers[block] = frame.first_layer + frame.num_layers
        self._frames += 1
        for digest in frame.digests:
            self._digest.update(digest.to_bytes(8, "little"))

    def check_complete(self, commit: KvCommit) -> None:
        """Raises DataLoss unless the commit matches the lease and the frames that arrived."""
        if commit.first_token < 0:
            raise DataLoss(f"first token {commit.first_token} is not a token id")
        blocks, room = self._ours.blocks_for(commit.num_tokens), len(self._lease.blocks)
        fits = blocks == room or (self._lease.partial and blocks < room)
        if commit.num_tokens < 1 or not fits:
            raise DataLoss(
                f"the commit has {commit.num_tokens} tokens, which do not match the "
                f"{len(self._lease.blocks)} blocks of the lease"
            )
        wanted = range(self._first, self._theirs.blocks_for(commit.num_tokens))
        # A lease without writable blocks needs no frames, even if its cached part ends within a
        # block of the sender.
        missing = sum(self._next_layer(block) < len(self._theirs.layers) for block in wanted)
        if commit.in_vllm is not None:
            check_vllm_blocks(commit.in_vllm, blocks)
        elif missing and self._lease.writable:
            raise DataLoss(f"{missing} of {len(wanted)} blocks are missing at the commit")
        digest = commit_digest(self._digest, commit.first_token, commit.num_tokens, commit.in_vllm)
        if commit.frames != self._frames:
            raise DataLoss(f"the commit counts {commit.frames} frames; {self._frames} arrived")
        if commit.digest != digest:
            raise DataLoss(
                f"the commit has digest {commit.digest:016x}; the digest of the {self._frames} "
                f"frames that arrived, the first token and the number of tokens is {digest:016x}"
            )
