"""The shared part of gloo and nccl: tensors travel over a torch.distributed group of two,
everything else over gRPC.

torch.distributed neither authenticates nor encrypts; these transports are for a private network.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from kv_transfer.arena import Arena, digest_kind, places_in, read_blocks
from kv_transfer.block_copy import copy_blocks
from kv_transfer.digest import multilinear_digests
from kv_transfer.plan import Places
from kv_transfer.transports import Source, gloo, layers_of, nccl, source_of
from kvrelay.errors import FailedPrecondition, Unavailable
from kvrelay.messages import HandoffTarget
from kvrelay.types import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen

_SENDER, _RECEIVER = 0, 1
# Idle groups that are kept. A peer that died leaves its group behind.
_MAX_IDLE = 64


@contextmanager
def _lost_peer() -> Iterator[None]:
    """Raises Unavailable for a RuntimeError, by which torch.distributed reports every error with a
    peer.
    """
    try:
        yield
    except RuntimeError as error:
        # Without the location in PyTorch's source.
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        raise Unavailable(f"the process group with the peer failed: {reason}") from error


def _parse(rendezvous: str) -> tuple[str, int, str]:
    """Splits HOST:PORT/NAME into its parts. Raises FailedPrecondition for any other form."""
    address, _, name = rendezvous.rpartition("/")
    host, _, port = address.rpartition(":")
    if not (host and name and port.isdecimal()):
        raise FailedPrecondition(f"rendezvous {rendezvous!r} is not HOST:PORT/NAME")
    return host, int(port), name


def _store(host: str, port: int, timeout: timedelta, listening_fd: int | None = None) -> Store:
    """The rendezvous store of two ranks: the server behind `listening_fd`, or a client of it."""
    store: Store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=listening_fd is not None,
        master_listen_fd=listening_fd,
        wait_for_workers=False,
        timeout=timeout,
    )
    return store


class PairGroup:
    """A group of one sender and one receiver. Only one push uses it at a time, so pushes cannot
    interfere.
    """

    def __init__(
        self, backend: str, rendezvous: str, rank: int, host: str, timeout_s: float
    ) -> None:
        self.rendezvous = rendezvous
        self._backend = backend
        self._rank = rank
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        # The send under way.
        self._sending: Any = None

    def join(self, store: Store | None) -> None:
        """Waits for the other rank, which must be joining too.

        `store` is the sender's own. The receiver passes None and connects to the sender's store.
        """
        if self._group is not None:
            return
        host, port, name = _parse(self.rendezvous)
        make = gloo.make_group if self._backend == "gloo" else nccl.make_group
        with _lost_peer():
            if store is None:
                store = _store(host, port, self._timeout)
            self._group = make(PrefixStore(name, store), self._rank, self._host, self._timeout)

    def send(self, data: torch.Tensor) -> None:
        """Starts to send `data` after the previous send has completed. Raises Unavailable."""
        with _lost_peer():
            if self._sending is not None:
                self._sending.wait(self._timeout)
            self._sending = self._group.send([data], _RECEIVER, 0)

    def receive(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Waits for the next tensor: `num_bytes` of uint8 on `device`. Raises Unavailable."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        with _lost_peer():
            self._group.recv([data], _SENDER, 0).wait(self._timeout)
        return data

    def close(self) -> None:
        """Aborts the group. Safe to call twice."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class SenderGroups:
    """A sender's groups, each with one receiver of one epoch, made at the first push that needs
    it.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._address = ""
        self._names = count()
        # Oldest first.
        self._idle: OrderedDict[PairGroup, tuple[str, str, int]] = OrderedDict()

    @contextmanager
    def lend(
        self, backend: str, target: HandoffTarget, arena: Arena, *, digests: bool
    ) -> Iterator[GroupOutbound]:
        """The sending half for one push. If the push fails, its group is closed, since an
        incomplete transfer may be left in it.
        """
        store = self._open_store()
        pair = backend, target.address, target.epoch
        group = next((group for group, owner in self._idle.items() if owner == pair), None)
        if group is None:
            rendezvous = f"{self._address}/{arena.nonce:x}-{next(self._names)}"
            group = PairGroup(backend, rendezvous, _SENDER, self._host, self._timeout_s)
        else:
            del self._idle[group]
        try:
            yield GroupOutbound(group, store, arena, digests=digests)
        except BaseException:
            group.close()
            raise
        self._idle[group] = pair
        if len(self._idle) > _MAX_IDLE:
            self._idle.popitem(last=False)[0].close()

    def close(self) -> None:
        """Closes the idle groups and the store."""
        for group in self._idle:
            group.close()
        self._idle.clear()
        self._store = None

    def _open_store(self) -> Store:
        if self._store is None:
            # The store's own socket would listen on all interfaces.
            listener = socket.create_server((self._host, 0))
            host, port = listener.getsockname()[:2]
            self._address = f"{host}:{port}"
            self._store = _store(host, port, timedelta(seconds=self._timeout_s), listener.detach())
        return self._store


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


class ReceiverGroups:
    """A receiver's groups, by the rendezvous that their senders announced."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        # Oldest first.
        self._idle: OrderedDict[str, PairGroup] = OrderedDict()

    @contextmanager
    def lend(
        self, backend: str, rendezvous: str, layout: KvLayout, device: torch.device
    ) -> Iterator[GroupInbound]:
        """The receiving half for one push; see `SenderGroups.lend`."""
        group = self._idle.pop(rendezvous, None)
        if group is None:
            group = PairGroup(backend, rendezvous, _RECEIVER, self._host, self._timeout_s)
        try:
            yield GroupInbound(group, layout, device if backend == "nccl" else torch.device("cpu"))
        except BaseException:
            group.close()
            raise
        self._idle[rendezvous] = group
        if len(self._idle) > _MAX_IDLE:
            self._idle.popitem(last=False)[1].close()


class GroupInbound:
    """The receiver's half. `layout` is the sender's; tensors are received on `device`."""

    def __init__(self, group: PairGroup, layout: KvLayout, device: torch.device) -> None:
        self._group = group
        self._layout = layout
        self._device = device

    def connect(self) -> None:
        """Joins the group. Waits for the sender."""
        self._group.join(None)

    def source(self, frame: KvBlocks) -> Source:
        """Receives the frame's tensor. Raises Unavailable."""
        return source_of(self._group.receive(frame.num_bytes, self._device), frame, self._layout)
