"""The operator's client; what it does for commands is tested with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from support.scripted_router import serving
from support.tcp_proxy import proxy_to

import kvrelay
from kvrelay.client import admin
from kvrelay.wire import cluster as wire


class Silent(wire.ClusterServiceServicer):
    """Tells once, then never again."""

    async def WatchStatus(
        self, request: wire.pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await context.write(wire.pb.ClusterStatus(model="demo", state="ready"))
        await asyncio.Event().wait()


async def test_a_router_that_vanished_without_a_word_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = dict(admin._KEEPALIVE)
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 15_000
    assert options["grpc.http2.ping_timeout_ms"] <= options["grpc.keepalive_timeout_ms"]
    monkeypatch.setattr(admin, "_KEEPALIVE", tuple((name, 200) for name in options))
    with serving(Silent()) as target:
        async with proxy_to(target) as proxy:
            client = admin.AdminClient(proxy.address)
            statuses = client.watch()
            assert (await asyncio.to_thread(next, statuses)).model == "demo"
            proxy.part()
            with pytest.raises(kvrelay.Unavailable):
                await asyncio.to_thread(next, statuses)
            client.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.load_adapter("\ud800", "/a"),
        lambda client: client.load_adapter("a", 1),
        lambda client: client.unload_adapter("\ud800"),
        lambda client: client.restart("\ud800"),
    ],
)
def test_what_no_message_can_hold_is_an_invalid_argument(
    call: Callable[[admin.AdminClient], object],
) -> None:
    client = admin.AdminClient("127.0.0.1:1")
    with pytest.raises(kvrelay.InvalidArgument, match="cannot be sent"):
        call(client)
    client.close()
