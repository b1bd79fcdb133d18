"""The block writer: writes pushed KV to the blocks of a lease and checks it against its digests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kv_transfer.arena import Arena, gathered, places_in, read_blocks, write_blocks
from kv_transfer.block_copy import copy_blocks
from kv_transfer.conversion import Span, convert
from kv_transfer.digest import MULTILINEAR, XXH3, multilinear_digests
from kv_transfer.lease import Lease
from kv_transfer.plan import Places
from kv_transfer.transports import Source, layers_of
from kvrelay.errors import DataLoss, FailedPrecondition, Unimplemented
from kvrelay.types import DTYPE_BYTES, KvLayout
from kvrelay.wire.transfer import KvBlocks

# Tokens.
_MAX_BLOCK_SIZE = 1024


class Landing:
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

    def land(self, source: Source, frame: KvBlocks) -> None:
        """Writes a frame's KV. Raises DataLoss if it differs from the sent bytes; the blocks'
        content is then invalid.
        """
        if self._digest is not None and len(frame.digests) != frame.count:
            raise DataLoss(
                f"frame {frame.sequence} has {len(frame.digests)} digests for {frame.count} blocks"
            )
        if self._digest == MULTILINEAR:
            data = (
                source.data
                if isinstance(source.data, torch.Tensor)
                else torch.from_numpy(source.data)
            )
            self._check(frame, multilinear_digests(data, source.places, source.blocks))
        if self._theirs == self._arena.layout:
            blocks = self._lease.blocks[frame.first : frame.first + frame.count]
            found = write_blocks(
                self._arena,
                blocks,
                layers_of(frame),
                source.data,
                source.places,
                source.blocks,
                digests=self._in_passing,
            )
            self._check(frame, found)
        else:
            self._convert(source, frame)

    def _convert(self, source: Source, frame: KvBlocks) -> None:
        """Converts a private copy of the source, so that the checked bytes are the converted
        bytes.
        """
        ours, theirs, layers = self._arena.layout, self._theirs, layers_of(frame)
        places = Places.of_payload(theirs, frame.count, layers)
        numbers = range(frame.count)
        if isinstance(source.data, torch.Tensor):
            data = gathered(source.data, source.places, source.blocks)
        else:
            on_host = np.empty(frame.num_bytes, dtype=np.uint8)
            found = copy_blocks(
                source.data,
                source.places,
                source.blocks,
                on_host,
                places,
                numbers,
                digests=self._in_passing,
            )
            self._check(frame, found)
            data = torch.from_numpy(on_host).to(self._arena.buffer.device)
        begin = max(frame.first * theirs.block_size, self._lease.cached_blocks * ours.block_size)
        end = min(
            (frame.first + frame.count) * theirs.block_size,
            len(self._lease.blocks) * ours.block_size,
        )
        first, last = begin // ours.block_size, ours.blocks_for(end)
        sent = Span(data, theirs, places, numbers, frame.first * theirs.block_size)
        blocks, start, tokens = (
            self._lease.blocks[first:last],
            first * ours.block_size,
            range(begin, end),
        )
        if len(self._arena.shares) == 1:
            target = Span(self._arena.buffer, ours, places_in(self._arena, layers), blocks, start)
            convert(sent, target, tokens, layers)
            return
        # Ranks on several GPUs: converted on the host, since a frame may bring a part of a block.
        held = read_blocks(self._arena, blocks, layers).cpu()
        payload = Places.of_payload(ours, len(blocks), layers)
        convert(
            replace(sent, data=data.cpu()),
            Span(held, ours, payload, range(len(blocks)), start),
            tokens,
            layers,
        )
        write_blocks(
            self._arena, blocks, layers, held.numpy(), payload, range(len(blocks)), digests=False
        )

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


def check_layouts(ours: KvLayout, theirs: KvLayout) -> None:
    """Raises FailedPrecondition unless blocks of either layout can be converted to the other."""
    if theirs.layers != ours.layers:
        raise FailedPrecondition(
            f"the sender's KV has {len(theirs.layers)} layers, or KV heads or head dimensions, "
            "that differ from this worker's; both workers need the same model"
        )
    if theirs.ranks < 1 or any(layer.kv_heads % theirs.ranks for layer in theirs.layers):
        raise FailedPrecondition(
            f"the sender's KV heads cannot be divided evenly among {theirs.ranks} ranks"
        )
    fits = 1 <= theirs.block_size <= _MAX_BLOCK_SIZE and theirs.dtype in DTYPE_BYTES
    # The order of the CPU kernels.
    if theirs.word:
        fits = fits and theirs.word in (1, 2) and theirs.block_size % 16 == 0
        fits = fits and not any(layer.k_dim % theirs.word for layer in theirs.layers)
    if not fits:
        raise FailedPrecondition(
            f"the sender's blocks of {theirs.block_size} tokens in {theirs.dtype} are not supported"
        )
