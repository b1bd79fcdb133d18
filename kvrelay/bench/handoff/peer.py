"""The parent's side of the receiving process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from kvrelay.bench.handoff.receiving import Settings
from kvrelay.errors import Unavailable
from kvrelay.process.child import bound_to_parent, send_signal
from kvrelay.worker_messages import HandoffTarget

_END_WITHIN_S = 10.0
_request_numbers = count()


class Peer:
    """The receiving process, which grants leases over its stdin and stdout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def grant(self, num_blocks: int, transport: str) -> tuple[tuple[str, int], HandoffTarget]:
        """Requests a lease of `num_blocks` blocks. Returns the key of the request that owns the
        lease, and the hand-off target. Raises Unavailable if the process ended.
        """
        request_id = f"bench-{next(_request_numbers)}"
        request = {"request_id": request_id, "num_blocks": num_blocks, "transport": transport}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return (request_id, 1), HandoffTarget(**json.loads(await self._line()))

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Unavailable("the receiving process ended; its output is above")
        return line.decode()


@asynccontextmanager
async def receiving(settings: Settings) -> AsyncIterator[Peer]:
    """Starts a receiving process. Raises Unavailable if it does not start."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_parent(
            sys.executable, "-m", "kvrelay.bench.handoff.receiving", settings.as_json()
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        peer = Peer(process)
        await peer._line()
        yield peer
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_WITHIN_S)
        except TimeoutError:
            send_signal(process, signal.SIGKILL)
            await process.wait()
