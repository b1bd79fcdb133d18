"""Bytes travel in the frames themselves: works wherever gRPC does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kv_transfer.arena import Arena, check_digest, digest_bytes, read_blocks, write_blocks
from kvrelay.errors import DataLoss
from kvrelay.wire.transfer import KvBlocks, KvOpen


class GrpcOutbound:
    def __init__(self, arena: Arena, *, digests: bool) -> None:
        self._arena = arena
        self._digests = digests

    def announce(self, opening: KvOpen) -> KvOpen:
        return opening

    def connect(self) -> None:
        pass

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        payload = read_blocks(self._arena, blocks).cpu().numpy().tobytes()
        return replace(header, payload=payload, digest=digest_bytes(payload) if self._digests else 0)


class GrpcInbound:
    def __init__(self, arena: Arena, *, digests: bool) -> None:
        self._arena = arena
        self._digests = digests

    def connect(self) -> None:
        pass

    def unpack(self, frame: KvBlocks, blocks: Sequence[int]) -> None:
        if len(frame.payload) != frame.num_bytes:
            raise DataLoss(f"frame {frame.sequence} holds {len(frame.payload)} bytes and claims {frame.num_bytes}")
        if self._digests:
            check_digest(frame.digest, digest_bytes(frame.payload))
        data = np.frombuffer(frame.payload, dtype=np.uint8)
        if self._arena.buffer.is_cpu:
            write_blocks(self._arena, blocks, data)
        else:
            write_blocks(self._arena, blocks, torch.tensor(data, device=self._arena.buffer.device))
