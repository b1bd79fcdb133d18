"""Transport by NIXL: the receiver reads the sender's blocks by RDMA, including from GPU to GPU, or
by any other means of UCX.

NIXL neither authenticates nor encrypts: a process with an agent's metadata can read and write the
memory that the agent has registered. This transport is for a private network.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from kv_transfer.blocks.arena import Arena, digest_kind, finish
from kv_transfer.blocks.plan import Copy
from kv_transfer.transports import Source, source_of
from kv_transfer.transports.named import NamedBlocks, NamedOutbound
from kv_transfer.transports.nixl_agent import NixlAgent
from kvrelay.errors import Unavailable
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen, RemoteArena

FRAME_BYTES = 8 * 2**20
# Senders that are remembered. A sender that died leaves its name behind.
_MAX_PEERS = 64
# Registered buffers that are kept while no push uses them.
_MAX_IDLE = 8


class ServedArena:
    """A sender's arena, registered at the first push that needs it."""

    def __init__(self, arena: Arena, host: str) -> None:
        self._arena = arena
        self._host = host
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._metadata = b""

    def remote(self) -> RemoteArena:
        """The description that a receiver needs to read the arena. The first call is slow."""
        buffer = self._arena.buffer
        with self._lock:
            if self._agent is None:
                agent = NixlAgent(f"kvrelay-{self._arena.nonce:x}", self._host, serves=True)
                agent.register(buffer)
                self._agent, self._metadata = agent, agent.metadata()
        return RemoteArena(self._metadata, buffer.data_ptr(), buffer.numel(), buffer.get_device())

    def close(self) -> None:
        """Removes the agent: no peer can read the arena any more."""
        self._agent = None


class NixlOutbound(NamedOutbound):
    """The sender's half: announces its NIXL agent and names blocks."""

    frame_bytes = FRAME_BYTES

    def __init__(self, served: ServedArena, arena: Arena, *, digests: bool) -> None:
        super().__init__(arena, digests=digests)
        self._served = served

    def announce(self, opening: KvOpen) -> KvOpen:
        """Adds the arena's NIXL metadata and the kind of digest. Raises Unimplemented without
        NIXL.
        """
        return replace(opening, arena=self._served.remote(), digest=digest_kind(self._arena))


class NixlReader:
    """A receiver's agent, made at the first push that needs it, with the known senders and the
    memory to read into.

    `device` is that of the receiver's arena.
    """

    def __init__(self, device: torch.device, host: str, timeout_s: float) -> None:
        self._device = device
        self._host = host
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: NixlAgent | None = None
        # Metadata -> name; the latest is last.
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        # Registered memory that no push uses, oldest first.
        self._idle: list[torch.Tensor] = []

    @contextmanager
    def lend(self, arena: RemoteArena, layout: KvLayout) -> Iterator[NixlInbound]:
        """The receiving half for one push from a sender whose arena has this layout. Raises
        Unimplemented if the arena's size does not fit the layout.
        """
        inbound = NixlInbound(self, arena, layout)
        try:
            yield inbound
        finally:
            inbound.close()

    @property
    def known(self) -> int:
        """Number of known senders."""
        return len(self._peers)

    def find(self, arena: RemoteArena) -> str:
        """The name of the arena's agent, which this call adds as a peer if necessary."""
        with self._lock:
            if arena.access not in self._peers:
                self._peers[arena.access] = self._agent.add_peer(arena.access)
                if len(self._peers) > _MAX_PEERS:
                    self._agent.drop_peer(self._peers.popitem(last=False)[1])
            self._peers.move_to_end(arena.access)
            return self._peers[arena.access]

    def read(self, arena: RemoteArena, copies: Sequence[Copy], num_bytes: int) -> torch.Tensor:
        """Copies from the arena into memory of `num_bytes` or more, which the caller passes to
        `give_back`.

        Raises Unavailable if the sender is gone or silent, and forgets the sender.
        """
        peer = self.find(arena)
        target = self._take(num_bytes, arena.device)
        try:
            self._agent.read(peer, arena.start, arena.device, target, copies, self._timeout_s)
        except Unavailable:
            with self._lock:
                if self._peers.pop(arena.access, None):
                    self._agent.drop_peer(peer)
            raise
        return target

    def _take(self, num_bytes: int, device: int) -> torch.Tensor:
        """Memory of at least this size for KV from the sender's `device`: on the GPU if both arenas
        are on GPUs.
        """
        where = torch.device("cpu") if device < 0 else self._device
        with self._lock:
            for index, memory in enumerate(self._idle):
                if memory.numel() >= num_bytes and memory.device == where:
                    return self._idle.pop(index)
            memory = torch.empty(max(num_bytes, FRAME_BYTES), dtype=torch.uint8, device=where)
            self._agent.register(memory)
            return memory

    def give_back(self, memory: torch.Tensor) -> None:
        """Makes memory from `read` available for the next read, once this thread's copies out of it
        are complete: NIXL writes without regard to the order of work on a GPU. Releases the memory
        that has been idle longest if too much is idle.
        """
        finish(self._device)
        with self._lock:
            self._idle.append(memory)
            if len(self._idle) > _MAX_IDLE:
                self._agent.deregister(self._idle.pop(0))

    @property
    def _agent(self) -> NixlAgent:
        if self._made is None:
            self._made = NixlAgent(f"kvrelay-{secrets.token_hex(8)}", self._host, serves=False)
        return self._made


class NixlInbound:
    """The receiver's half. `layout` is the sender's."""

    def __init__(self, reader: NixlReader, arena: RemoteArena, layout: KvLayout) -> None:
        self._reader = reader
        self._arena = arena
        self._layout = layout
        self._named = NamedBlocks(arena.size, layout)
        self._memory: torch.Tensor | None = None

    def open(self) -> None:
        """Adds the sender as a peer, before any other call. Raises Unimplemented if it cannot be
        read from.
        """
        self._reader.find(self._arena)

    def connect(self) -> None:
        """Does nothing: the transport has no connection of its own."""

    def source(self, frame: KvBlocks) -> Source:
        """Reads the frame's blocks. Raises DataLoss for blocks outside of the arena, Unavailable if
        the sender is gone.
        """
        self.close()
        self._memory = self._reader.read(self._arena, self._named.copies(frame), frame.num_bytes)
        return source_of(self._memory, frame, self._layout)

    def close(self) -> None:
        """Gives the memory of the last frame back."""
        if self._memory is not None:
            self._reader.give_back(self._memory)
            self._memory = None
