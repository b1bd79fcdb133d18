"""Routers of other projects in `kvrelay bench router`, with a stand-in that passes bytes on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from kvrelay.bench.router.clients import PeerClient, Received
from kvrelay.bench.router.mock_cluster import MockPools
from kvrelay.bench.router.peer_router import Peer, peer_cluster
from kvrelay.errors import InvalidArgument, Unavailable

POOLS = MockPools(prefill=1, decode=2, slots=4, step_s=0.001, token=0)
WORD = b" lighthouse"
CORE = min(os.sched_getaffinity(0))
# Takes the place of `python -m sglang_router.launch_router`, and passes the bytes of each
# connection on to one worker after the other.
STAND_IN = """#!{python}
import asyncio, itertools, sys
from urllib.parse import urlsplit

options = sys.argv[1:]
if options[0] == "-c":
    sys.exit()
assert options[:2] == ["-m", "sglang_router.launch_router"]
workers = itertools.cycle(options[options.index("--worker-urls") + 1 :])

async def copy(reader, writer):
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()

async def serve(reader, writer):
    url = urlsplit(next(workers))
    below, above = await asyncio.open_connection(url.hostname, url.port)
    await asyncio.gather(copy(reader, above), copy(below, writer))

async def main():
    port = int(options[options.index("--port") + 1])
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()

asyncio.run(main())
"""


def peer_of(program: Path, text: str) -> Peer:
    program.write_text(text)
    program.chmod(0o755)
    return Peer.parse(f"sglang-router={program}")


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_answers_pass_a_peer(tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """On uvloop, as the command runs, and on asyncio's own loop."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(pass_answers(tmp_path))


async def pass_answers(tmp_path: Path) -> None:
    peer = peer_of(tmp_path / "python", STAND_IN.format(python=sys.executable))
    said: defaultdict[str, list[float]] = defaultdict(list)
    received = Received()
    async with peer_cluster(peer, POOLS, CORE, WORD, said) as router:
        for number in range(3):
            client = PeerClient(router.http, WORD, said)
            await client.run(f"one-{number}", (1, 2, 3), 7, received)
            await client.run(f"two-{number}", (1, 2, 3), 1, received)
            await client.close()
        assert router.cpu_seconds() > 0
    assert (received.requests, received.tokens, received.messages) == (6, 24, 24)
    assert len(received.latencies) == 24
    assert min(received.latencies) > 0


async def test_a_peer_that_does_not_start(tmp_path: Path) -> None:
    peer = peer_of(tmp_path / "python", '#!/bin/sh\ntest "$1" = -c || exit 3\n')
    with pytest.raises(Unavailable, match="sglang-router ended with 3 before it was ready"):
        async with peer_cluster(peer, POOLS, CORE, WORD, defaultdict(list)):
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nginx=/usr/bin/python3", "allowed are sglang-router and vllm-router"),
        ("", "allowed are sglang-router and vllm-router"),
        ("sglang-router", "there is no program ''"),
        ("vllm-router=/no/x", "there is no program '/no/x'"),
        (f"vllm-router={sys.executable}", "has no package vllm-router; run .* install vllm-router"),
        ("vllm-router=/bin/false", "has no package vllm-router"),
    ],
)
def test_a_peer_that_cannot_be_measured(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Peer.parse(text)
