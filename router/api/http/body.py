"""Reads and parses request bodies within bounds on size, time and memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from router.api.http.completion import Json
from router.api.http.json_parser import object_steps
from router.core.body_budget import BodyBudget, Holding
from router.runtime.loop_slices import LoopSlices

MAX_BYTES = 4 * 2**20
# Limit on the total size of bodies that are not parsed yet.
MAX_HELD_BYTES = 128 * 2**20
# Timeout for a body's arrival.
RECEIVE_S = 20.0
_TOO_LARGE = f"the body is larger than {MAX_BYTES} bytes"
T = TypeVar("T")


class Bodies:
    """Reads the bodies of one listener's requests."""

    def __init__(self, slices: LoopSlices) -> None:
        self._slices = slices
        self._budget = BodyBudget(MAX_HELD_BYTES, "bytes of bodies")

    @asynccontextmanager
    async def parsed(self, request: Request, parse: Callable[[Json, str], T]) -> AsyncIterator[T]:
        """Yields the result of `parse` for the body and the request's id. The body counts against
        the memory budget until the context exits.

        A large body is parsed in slices, and streams continue between slices. Raises HTTPException
        for a body that is too large or too slow, ResourceExhausted if its tenant holds too much of
        the budget, and InvalidArgument.
        """
        tenant = request.state.tenant
        loop = asyncio.get_running_loop()
        evicted = asyncio.timeout(None)
        with self._budget.holding(tenant, lambda: evicted.reschedule(loop.time())) as holding:
            try:
                async with evicted:
                    value = await self._slices.run(
                        tenant, object_steps(await self._read(request, holding))
                    )
                    yield parse(value, request.state.request_id)
            except TimeoutError:
                if not holding.evicted:
                    raise
                raise self._budget.refusal() from None

    async def _read(self, request: Request, holding: Holding) -> deque[bytes]:
        """Returns the body in the parts in which it arrived. A single growing buffer would be
        copied again and again and would fragment memory.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            # Decompressed data would escape the size bound.
            raise HTTPException(
                415,
                "compressed bodies are not supported; send the body uncompressed",
                {"accept-encoding": "identity"},
            )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 9 or int(length) > MAX_BYTES):
            raise HTTPException(413, _TOO_LARGE)
        body: deque[bytes] = deque()
        size = 0
        try:
            async with asyncio.timeout(RECEIVE_S) as bound:
                async for part in request.stream():
                    if not part:
                        continue
                    body.append(part)
                    size += len(part)
                    if size > MAX_BYTES:
                        raise HTTPException(413, _TOO_LARGE)
                    self._budget.grow(holding, len(part))
        except TimeoutError:
            if not bound.expired():
                raise
            raise HTTPException(
                408,
                f"the body was not complete within {RECEIVE_S:g} s",
                {"connection": "close"},
            ) from None
        return body
