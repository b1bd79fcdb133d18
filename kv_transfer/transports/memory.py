"""Transport within one process: from arena to arena."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

from kv_transfer.blocks.arena import Arena
from kv_transfer.transports.named import NamedInbound
from kvrelay.errors import Unimplemented
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import SharedSegment

# This process's senders, by nonce.
_senders: WeakValueDictionary[int, Arena] = WeakValueDictionary()
# (worker id, epoch)
_receivers: set[tuple[str, int]] = set()


def register_sender(arena: Arena) -> None:
    """Makes the arena readable for receivers of this process, as long as it is referenced
    elsewhere.
    """
    _senders[arena.nonce] = arena


def register_receiver(worker_id: str, epoch: int) -> None:
    """Marks the receiver as one of this process."""
    _receivers.add((worker_id, epoch))


def is_local(worker_id: str, epoch: int) -> bool:
    """True if that worker's receiver is in this process."""
    return (worker_id, epoch) in _receivers


def accept(segment: SharedSegment, layout: KvLayout) -> NamedInbound:
    """The receiving half that reads the sender's arena directly. Raises Unimplemented if the arena
    is not in this process.
    """
    source = _senders.get(segment.nonce)
    if source is None or segment.pid != os.getpid():
        raise Unimplemented(f"arena {segment.nonce:x} does not exist in this process")
    return NamedInbound(source.buffer.numpy(), layout)
