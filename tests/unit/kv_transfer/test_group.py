"""Where torch.distributed listens: it authenticates nobody, so nowhere but on the worker's own
address.
"""

from __future__ import annotations

import socket

import pytest
import torch
from support.listening import listening
from support.transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, sender_of

from kv_transfer.transports.group_inbound import ReceiverGroups
from kv_transfer.transports.pair_group import PairGroup
from kvrelay.errors import Unavailable


async def test_the_store_listens_on_the_workers_address_only() -> None:
    before = listening()
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2], transport="gloo"))
        push.send(0, [5, 6])
        await push.commit(1, 8, 0.0)
        opened = listening() - before
        assert len(opened) >= 2, "the receiver's server and the sender's store"
        assert {host for host, _ in opened} == {"127.0.0.1"}
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in {host for host, _ in listening() - before}, (
            "the look itself would see it"
        )


async def test_a_store_that_does_not_open_in_time_is_unavailable_and_leaves_no_socket() -> None:
    sockets = listening()
    async with decode_end() as decode, sender_of(MemoryFile(), timeout_s=0.0) as sender:
        target = decode.grant([1, 2], transport="gloo")
        with pytest.raises(Unavailable, match="timed out"):
            async with sender.outbound("gloo", target):
                pytest.fail("no store, no group")
        assert len(listening() - sockets) == 1, "the receiver's server"


def test_a_group_that_two_pushes_name_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No honest sender does so."""
    closed: list[PairGroup] = []
    monkeypatch.setattr(PairGroup, "close", lambda group: closed.append(group))
    groups = ReceiverGroups("127.0.0.1", 1.0)
    device = torch.device("cpu")
    with (
        groups.lend("gloo", "127.0.0.1:1/x", LAYOUT, device),
        groups.lend("gloo", "127.0.0.1:1/x", LAYOUT, device),
    ):
        pass
    assert (len(groups._idle), len(closed)) == (1, 1)
