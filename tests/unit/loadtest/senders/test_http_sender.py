"""The addresses that a load test over HTTP takes."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.client.connection import OPEN
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.loadtest.senders.target import open_target

MODELS = b'{"data": [{"id": "demo", "vocab_size": 337}]}'
METRICS = b"kvrelay_prefix_cache_queries_total 5\n"
ANSWERS = {"/v1/models": MODELS, "/metrics": METRICS}


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("metrics", ["", "/metrics", "/metrics/"])
async def test_an_address_may_end_as_users_know_it(path: str, metrics: str) -> None:
    """With the path of OpenAI's base URL, and with that of the metrics."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        body = ANSWERS[request.split()[1].decode()]
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        # Without http:// where it has no path.
        metrics_url = url + metrics if metrics else url.removeprefix("http://")
        async with open_target(url + path, 20.0, None, metrics_url, OPEN) as target:
            assert target.model.id == "demo"
            counters = await target.counters()
    assert counters is not None
    assert counters.queries == 5


@pytest.mark.parametrize("target", ["http://h:1/v1/completions", "http://h/v1", "h:1", "ftp://h:1"])
def test_another_address_says_what_is_allowed(target: str) -> None:
    with pytest.raises(InvalidArgument, match=r"http://HOST:PORT or https://\S+, with or without"):
        HttpSender(target, 1.0)
    with pytest.raises(InvalidArgument, match="with or without /metrics"):
        HttpSender("http://h:1/metric", 1.0, path="/metrics")
