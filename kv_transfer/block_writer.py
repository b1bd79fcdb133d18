"""The block writer: writes pushed KV to the blocks of a lease and checks it against its digests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kv_transfer.blocks.arena import Arena, gathered, places_in, read_blocks, write_blocks
from kv_transfer.blocks.block_copy import copy_blocks
from kv_transfer.blocks.conversion import Span, convert
from kv_transfer.blocks.digest import MULTILINEAR, XXH3, multilinear_digests
from kv_transfer.blocks.plan import Layers, Places
from kv_transfer.lease import Lease
from kv_transfer.transports import Source, layers_of
from kvrelay.errors import DataLoss, Unimplemented
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks


class BlockWriter:
    """Writes the frames of one push.

    `theirs` is the layout of the sender's blocks. `digest` is the kind of their digests, or None to
    skip the check. Raises Unimplemented for an unknown kind.
    """

    def __init__(self, arena: Arena, lease: Lease, theirs: KvLayout, digest: str | None) -> None:
        if digest not in (XXH3, MULTILINEAR, None):
            raise Unimplemented(
                f"digest {digest!r} is unknown; allowed are {XXH3} and {MULTILINEAR}"
            )
        self._arena = arena
        self._lease = lease
        self._theirs = theirs
        self._digest = digest

    def write(self, source: Source, frame: KvBlocks) -> None:
        """Writes a frame's KV. Raises DataLoss if it differs from the sent bytes; the blocks'
        content is then invalid.
        """
        if self._digest is not None and len(frame.digests) != frame.count:
            raise DataLoss(
                f"frame {frame.sequence} has {len(frame.digests)} digests for {frame.count} blocks"
            )
        if self._digest == MULTILINEAR:
            data = source.data
            data = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
            self._check(frame, multilinear_digests(data, source.places, source.blocks))
        if self._theirs == self._arena.layout:
            self._copy(source, frame)
        else:
            self._convert(
                self._private_copy(source, frame), self._tokens_of(frame), layers_of(frame)
            )

    def _copy(self, source: Source, frame: KvBlocks) -> None:
        found = write_blocks(
            self._arena,
            self._lease.blocks[frame.first : frame.first + frame.count],
            layers_of(frame),
            source.data,
            source.places,
            source.blocks,
            digests=self._in_passing,
        )
        self._check(frame, found)

    def _private_copy(self, source: Source, frame: KvBlocks) -> Span:
        """A copy of the source in plan order, so that the checked bytes are the converted bytes."""
        layers, numbers = layers_of(frame), range(frame.count)
        places = Places.of_payload(self._theirs, frame.count, layers)
        if isinstance(source.data, torch.Tensor):
            data = gathered(source.data, source.places, source.blocks)
        else:
            on_host = np.empty(frame.num_bytes, dtype=np.uint8)
            found = copy_blocks(
                source.data, source.places, source.blocks, on_host, places, numbers,
                digests=self._in_passing,
            )  # fmt: skip
            self._check(frame, found)
            data = torch.from_numpy(on_host).to(self._arena.buffer.device)
        return Span(data, self._theirs, places, numbers, frame.first * self._theirs.block_size)

    def _tokens_of(self, frame: KvBlocks) -> range:
        """The tokens of the sequence that the frame brings and that the lease takes."""
        ours, theirs = self._arena.layout.block_size, self._theirs.block_size
        return range(
            max(frame.first * theirs, self._lease.cached_blocks * ours),
            min((frame.first + frame.count) * theirs, len(self._lease.blocks) * ours),
        )

    def _convert(self, sent: Span, tokens: range, layers: Layers) -> None:
        ours, arena = self._arena.layout, self._arena
        first = tokens.start // ours.block_size
        blocks = self._lease.blocks[first : ours.blocks_for(tokens.stop)]
        start = first * ours.block_size
        if len(arena.shares) == 1:
            target = Span(arena.buffer, ours, places_in(arena, layers), blocks, start)
            convert(sent, target, tokens, layers)
            return
        # Ranks on several GPUs: converted on the host, since a frame may bring a part of a block.
        held, numbers = read_blocks(arena, blocks, layers).cpu(), range(len(blocks))
        payload = Places.of_payload(ours, len(blocks), layers)
        on_host = replace(sent, data=sent.data.cpu())
        convert(on_host, Span(held, ours, payload, numbers, start), tokens, layers)
        write_blocks(arena, blocks, layers, held.numpy(), payload, numbers, digests=False)

    @property
    def _in_passing(self) -> bool:
        """True if the digests come with the copy. Multilinear digests are computed before it."""
        return self._digest == XXH3

    def _check(self, frame: KvBlocks, found: tuple[int, ...]) -> None:
        for index, (sent, arrived) in enumerate(zip(frame.digests, found, strict=False)):
            if sent != arrived:
                raise DataLoss(
                    f"block {frame.first + index} arrived with digest {arrived:016x} instead "
                    f"of {sent:016x}; the hand-off is rejected"
                )
