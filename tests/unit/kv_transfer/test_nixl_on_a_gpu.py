"""Memory that NIXL reads into, where copies out of it are queued as on a GPU: a stand-in for NIXL's
agent, and a queue for the GPU's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.transfer_ends import LAYOUT

from kv_transfer.transports import nixl
from kv_transfer.transports.nixl import NixlReader
from kvrelay.wire.transfer import KvBlocks, RemoteArena

NUM_BLOCKS = 64


class Agent:
    """Each read brings another byte."""

    def __init__(self) -> None:
        self.reads = 0

    def add_peer(self, access: bytes) -> str:
        return "peer"

    def register(self, memory: torch.Tensor) -> None:
        pass

    def deregister(self, memory: torch.Tensor) -> None:
        pass

    def read(self, peer: str, start: int, device: int, target: torch.Tensor, *rest: Any) -> None:
        self.reads += 1
        target.fill_(self.reads)


def frame(sequence: int) -> KvBlocks:
    return KvBlocks(sequence, 0, 1, 0, 2, LAYOUT.block_bytes, source_blocks=(sequence,))


@pytest.mark.parametrize("pushes", [1, 2, 5])
def test_memory_is_read_into_again_once_the_copies_out_of_it_are_complete(
    pushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: list[Callable[[], None]] = []

    def finish(device: torch.device) -> None:
        while stream:
            stream.pop(0)()

    monkeypatch.setattr(nixl, "finish", finish)
    reader = NixlReader(torch.device("cpu"), "127.0.0.1", timeout_s=1.0)
    agent = Agent()
    monkeypatch.setattr(reader, "_made", agent)
    size = LAYOUT.arena_bytes(NUM_BLOCKS)
    arena = RemoteArena(b"access", 0, size, -1)
    copied: list[bytes] = []
    for _ in range(pushes):
        with reader.lend(arena, LAYOUT) as inbound:
            for sequence in range(3):
                data = inbound.source(frame(sequence)).data
                stream.append(lambda data=data: copied.append(bytes(data[:4])))  # type: ignore[misc]
    finish(torch.device("cpu"))
    assert agent.reads == 3 * pushes
    assert copied == [bytes([number]) * 4 for number in range(1, 3 * pushes + 1)]
