"""gRPC's options of a channel, by target."""

from __future__ import annotations

import pytest

from kvrelay.client.base_client import channel_options

NO_PROXY = ("grpc.enable_http_proxy", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_a_proxy_is_not_asked_for_loopback(host: str) -> None:
    assert NO_PROXY in channel_options(f"{host}:50051")


@pytest.mark.parametrize("host", ["10.0.0.1", "router", "localhost.example", "[fd00::1]"])
def test_other_hosts_may_be_behind_a_proxy(host: str) -> None:
    assert NO_PROXY not in channel_options(f"{host}:50051")
