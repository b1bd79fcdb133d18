"""Reads from other workers' vLLM, from the commit to the receipt."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from kv_transfer.lease import Lease
from kvrelay.clock import ManualClock
from kvrelay.errors import Cancelled
from kvrelay.vllm_engine.nixl.remote_reads import RemoteReads
from kvrelay.vllm_engine.nixl.side_channel import side_channel
from kvrelay.wire.kv_frame import VllmBlocks

KEY = ("request", 0)
LEASE = Lease(1, 1, KEY, (1, 2), 0, num_tokens=40)
BLOCKS = VllmBlocks("engine", "s1-0123abcd", "127.0.0.1", 5600, (7, 3), 50.0, held_s=4.0)


async def test_vllm_gets_the_parameters_of_its_own_connector() -> None:
    reads = RemoteReads(ManualClock(10.0))
    reads.expect(LEASE, BLOCKS)
    read = reads.find(KEY)
    assert read is not None
    assert read.deadline == 13.0, "a second before the blocks may change"
    assert read.params["remote_block_ids"] == [[7, 3]]
    assert read.params["remote_num_tokens"] == 40
    assert read.params["do_remote_prefill"]


async def test_the_receipt_comes_when_the_sequence_has_its_kv() -> None:
    reads = RemoteReads(ManualClock(10.0))
    finished = reads.expect(LEASE, BLOCKS)
    reads.finish(KEY, 2)
    reads.finish(KEY, 9)
    reads.forget(KEY)
    assert await finished == 2
    assert reads.find(KEY) is None


async def test_a_sequence_that_ends_has_no_receipt() -> None:
    reads = RemoteReads(ManualClock(10.0))
    finished = reads.expect(LEASE, BLOCKS)
    reads.forget(KEY)
    with pytest.raises(Cancelled, match="ended before"):
        await finished


async def test_a_receipt_that_nobody_awaits_any_more_is_no_error() -> None:
    reads = RemoteReads(ManualClock(10.0))
    for end in (lambda: reads.finish(KEY, 2), lambda: reads.forget(KEY)):
        waiting = asyncio.ensure_future(reads.expect(LEASE, BLOCKS))
        waiting.cancel()
        end()


async def test_only_a_running_read_is_overdue() -> None:
    """One that waits for room is computed instead, and does not end."""
    reads = RemoteReads(ManualClock(10.0))
    reads.expect(LEASE, BLOCKS)
    assert not reads.overdue(1000.0)
    read = reads.find(KEY)
    assert read is not None
    read.running = True
    assert not reads.overdue(17.0)
    assert reads.overdue(18.0) == [KEY]


def test_the_port_for_handshakes_is_kept_until_vllm_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    with side_channel("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen()
    assert environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_NET_DEVICES": "lo",
    }
