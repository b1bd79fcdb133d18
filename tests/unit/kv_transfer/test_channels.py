"""The connections that a sender keeps to its peers."""

from __future__ import annotations

import asyncio

import pytest
from support.transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, sender_of

from kv_transfer import channels
from kv_transfer.channels import Channels
from kvrelay.errors import Unavailable


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


async def test_closing_waits_for_no_grace() -> None:
    """Of calls on a channel that was retired before."""
    async with decode_end() as decode, sender_of(MemoryFile(), timeout_s=60.0) as sender:
        target = decode.grant([1, 2])
        push = sender.open(KEY, target)
        push.send(0, [5])
        await push.opened()
        sender.channels.retire(target.address, sender.channels.get(target.address), 3600.0)
        async with asyncio.timeout(60):
            await sender.close()
        with pytest.raises(Unavailable, match="closed"):
            sender.channels.get(target.address)
