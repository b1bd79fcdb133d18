"""The servers that a router runs, from their start to their end."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.http.server import http_server


async def test_a_request_that_the_end_of_the_server_cuts_off_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, cut_off = asyncio.Event(), asyncio.Event()

    async def hang(request: Request) -> Response:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut_off.set()
        raise AssertionError

    server, address = http_server(
        Starlette(routes=[Route("/", hang)]), "127.0.0.1:0", "listen.http"
    )
    server.config.timeout_graceful_shutdown = 0
    serving = asyncio.create_task(server.serve())
    host, port = address.split(":")
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asked.wait()
        server.should_exit = True
        await serving
        await cut_off.wait()
        writer.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
