"""The connections that a sender keeps to its peers."""

from __future__ import annotations

import asyncio

import pytest
from support.transfer_ends import LAYOUT

from kv_transfer import channels
from kv_transfer.channels import Channels


async def test_the_connections_of_former_peers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker of an elastic cluster has an address of its own."""
    monkeypatch.setattr(channels, "_MAX_OPEN", 4)
    monkeypatch.setattr(channels, "GRACE_S", 0.0)
    kept = Channels(LAYOUT)
    always = kept.get("127.0.0.1:1")
    former = []
    for port in range(2, 22):
        former.append(kept.get(f"127.0.0.1:{port}"))
        assert kept.get("127.0.0.1:1") is always
    await asyncio.gather(*kept._retired)
    closed = [one._channel.closed() for one in former]
    assert closed == [True] * 17 + [False] * 3
    assert not always._channel.closed()
    await kept.close()
