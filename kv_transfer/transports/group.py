"""What gloo and nccl share: tensors travel over a torch.distributed group of two, everything else
over gRPC.

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
_MAX_IDLE = 64  # groups that no push uses; a peer that died leaves some behind


@contextmanager
def _lost_peer() -> Iterator[None]:
    """torch.distributed says all that can go wrong with a peer with a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        # Without the place in PyTorch's source
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        raise Unavailable(f"the process group with the peer is broken: {reason}") from error


def _parse(rendezvous: str) -> tuple[str, int, str]:
    """HOST:PORT/NAME to its parts; raises FailedPrecondition if it is none."""
    address, _, name = rendezvous.rpartition("/")
    host, _, port = address.rpartition(":")
    if not (host and name and port.isdecimal()):
        raise FailedPrecondition(f"rendezvous {rendezvous!r} is not HOST:PORT/NAME")
    return host, int(port), name


def _store(host: str, port: int, timeout: timedelta, listening_fd: int | None = None) -> Store:
    """The store where two ranks find each other: the one behind `listening_fd`, or a client of
    it.
    """
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
    """One sender and one receiver. A push has it for itself, so that nothing of another one can be
    in the way.
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
        self._sending: Any = None  # the send under way

    def join(self, store: Store | None) -> None:
        """Waits for the other one, who must be joining too.

        `store` is the sender's own; the receiver connects to it.
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
        """Starts to send `data`, once what was sent before has gone."""
        with _lost_peer():
            if self._sending is not None:
                self._sending.wait(self._timeout)
            self._sending = self._group.send([data], _RECEIVER, 0)

    def receive(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        with _lost_peer():
            self._group.recv([data], _SENDER, 0).wait(self._timeout)
        return data

    def close(self) -> None:
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
        self._idle: OrderedDict[PairGroup, tuple[str, str, int]] = OrderedDict()  # oldest first

    @contextmanager
    def lend(
        self, backend: str, target: HandoffTarget, arena: Arena, *, digests: bool
    ) -> Iterator[GroupOutbound]:
        """For one push. The group is thrown away if that fails, since a transfer may be left half
        done in it.
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
        for group in self._idle:
            group.close()
        self._idle.clear()
        self._store = None

    def _open_store(self) -> Store:
        if self._store is None:
            # A socket of our own, since the store's would listen on all interfaces.
            listener = socket.create_server((self._host, 0))
            host, port = listener.getsockname()[:2]
            self._address = f"{host}:{port}"
            self._store = _store(host, port, timedelta(seconds=self._timeout_s), listener.detach())
        return self._store


class GroupOutbound:
    frame_bytes = 4 * 2**20

    def __init__(self, group: PairGroup, store: Store, arena: Arena, *, digests: bool) -> None:
        self._group = group
        self._store = store
        self._arena = arena
        self._digests = digests

    def announce(self, opening: KvOpen) -> KvOpen:
        return replace(opening, rendezvous=self._group.rendezvous, digest=digest_kind(self._arena))

    def connect(self) -> None:
        self._group.join(self._store)

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
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
        self._idle: OrderedDict[str, PairGroup] = OrderedDict()  # oldest first

    @contextmanager
    def lend(
        self, backend: str, rendezvous: str, layout: KvLayout, device: torch.device
    ) -> Iterator[GroupInbound]:
        """For one push; see `SenderGroups.lend`."""
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
    """`layout` is the sender's, `device` the one that tensors are received on."""

    def __init__(self, group: PairGroup, layout: KvLayout, device: torch.device) -> None:
        self._group = group
        self._layout = layout
        self._device = device

    def connect(self) -> None:
        self._group.join(None)

    def source(self, frame: KvBlocks) -> Source:
        return source_of(self._group.receive(frame.num_bytes, self._device), frame, self._layout)
