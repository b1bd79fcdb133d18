"""The sender's side of gloo and nccl: tensors travel over a group of two, everything else over
gRPC.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch
from torch.distributed.distributed_c10d import Store

from kv_transfer.blocks.arena import Arena, digest_kind, places_in, read_blocks
from kv_transfer.blocks.block_copy import copy_blocks
from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.blocks.digest import multilinear_digests
from kv_transfer.blocks.plan import Places
from kv_transfer.transports import layers_of
from kv_transfer.transports.pair_group import MAX_IDLE, SENDER, PairGroup, open_store
from kvrelay.errors import Unavailable
from kvrelay.wire.transfer import KvBlocks, KvOpen
from kvrelay.worker_messages import HandoffTarget


class SenderGroups:
    """A sender's groups, each with one receiver of one epoch, made at the first push that needs
    it.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        # Shared by the pushes that wait for it.
        self._store: asyncio.Task[Store] | None = None
        self._address = ""
        self._names = count()
        # Oldest first.
        self._idle: OrderedDict[PairGroup, tuple[str, str, int]] = OrderedDict()

    @asynccontextmanager
    async def lend(
        self, backend: str, target: HandoffTarget, arena: Arena, *, digests: bool
    ) -> AsyncIterator[GroupOutbound]:
        """The sending half for one push. If the push fails, its group is closed, since an
        incomplete transfer may be left in it. Raises Unavailable if this host's own store cannot
        be opened.
        """
        if self._store is None:
            self._store = asyncio.create_task(in_thread(self._open_store))
            self._store.add_done_callback(self._opened)
        store = await asyncio.shield(self._store)
        pair = backend, target.address, target.epoch
        group = next((group for group, owner in self._idle.items() if owner == pair), None)
        if group is None:
            rendezvous = f"{self._address}/{arena.nonce:x}-{next(self._names)}"
            group = PairGroup(backend, rendezvous, SENDER, self._host, self._timeout_s)
        else:
            del self._idle[group]
        try:
            yield GroupOutbound(group, store, arena, digests=digests)
        except BaseException:
            group.close()
            raise
        self._idle[group] = pair
        if len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)[0].close()

    def close(self) -> None:
        """Closes the idle groups and the store."""
        for group in self._idle:
            group.close()
        self._idle.clear()
        self._store = None

    def _opened(self, opening: asyncio.Task[Store]) -> None:
        if (opening.cancelled() or opening.exception()) and self._store is opening:
            self._store = None

    def _open_store(self) -> Store:
        try:
            # The store's own socket would listen on all interfaces.
            listener = socket.create_server((self._host, 0))
        except OSError as error:
            raise Unavailable(f"a group cannot be offered at {self._host}: {error}") from error
        host, port = listener.getsockname()[:2]
        self._address = f"{host}:{port}"
        descriptor = listener.detach()
        inode = os.fstat(descriptor).st_ino
        try:
            return open_store(host, port, timedelta(seconds=self._timeout_s), descriptor)
        except Unavailable:
            # TCPStore closes its socket unless it failed early.
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)
            raise


class GroupOutbound:
    """The sender's half: copies each frame's blocks to a tensor and sends it."""

    frame_bytes = 4 * 2**20

    def __init__(self, group: PairGroup, store: Store, arena: Arena, *, digests: bool) -> None:
        self._group = group
        self._store = store
        self._arena = arena
        self._digests = digests

    def announce(self, opening: KvOpen) -> KvOpen:
        """Adds the rendezvous and the kind of digest."""
        return replace(opening, rendezvous=self._group.rendezvous, digest=digest_kind(self._arena))

    def connect(self) -> None:
        """Joins the group. Waits for the receiver."""
        self._group.join(self._store)

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        """Starts to send the blocks; the frame carries only their digests."""
        layers = layers_of(header)
        places = Places.of_payload(self._arena.layout, len(blocks), layers)
        numbers = range(len(blocks))
        if self._arena.buffer.is_cpu:
            data = torch.empty(header.num_bytes, dtype=torch.uint8)
            digests = copy_blocks(
                self._arena.buffer.numpy(), places_in(self._arena, layers), blocks,
                data.numpy(), places, numbers, digests=self._digests,
            )  # fmt: skip
        else:
            data = read_blocks(self._arena, blocks, layers)
            digests = multilinear_digests(data, places, numbers) if self._digests else ()
        self._group.send(data)
        return replace(header, digests=digests)
