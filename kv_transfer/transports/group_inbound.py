"""The receiver's side of gloo and nccl."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kv_transfer.transports import Source, source_of
from kv_transfer.transports.pair_group import MAX_IDLE, RECEIVER, PairGroup
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks


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
            group = PairGroup(backend, rendezvous, RECEIVER, self._host, self._timeout_s)
        try:
            yield GroupInbound(group, layout, device if backend == "nccl" else torch.device("cpu"))
        except BaseException:
            group.close()
            raise
        if (other := self._idle.pop(rendezvous, None)) is not None:
            # Two pushes named one group.
            other.close()
        self._idle[rendezvous] = group
        if len(self._idle) > MAX_IDLE:
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
