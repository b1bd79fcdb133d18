"""Sender and receiver in one process: from arena to arena."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

from kv_transfer.arena import Arena
from kv_transfer.transports.named import NamedInbound
from kvrelay.errors import Unimplemented
from kvrelay.types import KvLayout
from kvrelay.wire.transfer import SharedSegment

_senders: WeakValueDictionary[int, Arena] = WeakValueDictionary()  # this process's, by nonce
_receivers: set[tuple[str, int]] = set()  # (worker id, epoch)


def register_sender(arena: Arena) -> None:
    _senders[arena.nonce] = arena


def register_receiver(worker_id: str, epoch: int) -> None:
    _receivers.add((worker_id, epoch))


def is_local(worker_id: str, epoch: int) -> bool:
    """Whether that worker's receiver lives in this process."""
    return (worker_id, epoch) in _receivers


def accept(segment: SharedSegment, layout: KvLayout) -> NamedInbound:
    source = _senders.get(segment.nonce)
    if source is None or segment.pid != os.getpid():
        raise Unimplemented(f"arena {segment.nonce:x} is not in this process")
    return NamedInbound(source.buffer.numpy(), layout)
