"""Where torch.distributed listens: it authenticates nobody, so nowhere but on the worker's own
address.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta

import pytest
import torch
from support.listening import listening
from support.transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, sender_of
from torch.distributed.distributed_c10d import Store

from kv_transfer.transports import group_outbound
from kv_transfer.transports.group_inbound import ReceiverGroups
from kv_transfer.transports.group_outbound import SenderGroups
from kv_transfer.transports.pair_group import PairGroup
from kvrelay.errors import Unavailable
from kvrelay.worker_messages import HandoffTarget


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


async def test_pushes_share_the_store_that_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def fail(host: str, port: int, timeout: timedelta, listening_fd: int) -> Store:
        opened.append(port)
        raise Unavailable("not in time")

    monkeypatch.setattr(group_outbound, "open_store", fail)
    before = listening()
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:

        async def lend(target: HandoffTarget) -> None:
            async with sender.outbound("gloo", target):
                pytest.fail("no store, no group")

        for number in range(2):
            targets = [
                decode.grant([number], key=(f"{number}-{push}", 0), transport="gloo")
                for push in range(3)
            ]
            found = await asyncio.gather(*map(lend, targets), return_exceptions=True)
            assert [str(one) for one in found] == ["not in time"] * 3
        assert len(listening() - before) == 1, "the receiver's server"
    assert len(opened) == 2, "once for each three"


async def test_a_descriptor_that_torch_closed_is_not_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[int] = []

    def fail(host: str, port: int, timeout: timedelta, listening_fd: int) -> Store:
        os.close(listening_fd)
        while listening_fd not in others:
            others.append(os.open(os.devnull, os.O_RDONLY))
        raise Unavailable("not in time")

    monkeypatch.setattr(group_outbound, "open_store", fail)
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        target = decode.grant([1], transport="gloo")
        with pytest.raises(Unavailable, match="not in time"):
            async with sender.outbound("gloo", target):
                pytest.fail("no store, no group")
    for other in others:
        os.close(other)


async def test_an_address_of_another_host_is_unavailable() -> None:
    groups = SenderGroups("203.0.113.1", 1.0)
    async with decode_end() as decode:
        target = decode.grant([1], transport="gloo")
        with pytest.raises(Unavailable, match=r"203\.0\.113\.1"):
            async with groups.lend("gloo", target, MemoryFile(), digests=False):
                pytest.fail("no store, no group")


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
