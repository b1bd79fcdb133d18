"""A request's body: read within bounds of size, time and memory, and parsed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from router.api.http.requests import Json, object_steps
from router.core.body_budget import BodyBudget, Holding
from router.runtime.loop_slices import LoopSlices

MAX_BYTES = 4 * 2**20
MAX_HELD_BYTES = 128 * 2**20  # of all bodies that are here and not parsed yet
RECEIVE_S = 20.0  # for a body to come
_CLOSE = {"connection": "close"}  # what is left of the body need not come
T = TypeVar("T")


class Bodies:
    """Reads the bodies of one listener's requests."""

    def __init__(self, slices: LoopSlices) -> None:
        self._slices = slices
        self._budget = BodyBudget(MAX_HELD_BYTES, "bytes of bodies")

    @asynccontextmanager
    async def parsed(self, request: Request, parse: Callable[[Json, str], T]) -> AsyncIterator[T]:
        """What `parse` makes of the body and of the id that the request has been given; it counts
        until it is left.

        A large body is parsed in slices, and streams go on between them. Raises HTTPException for a
        body that is too large or too slow, ResourceExhausted when its tenant has too many here,
        InvalidArgument.
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
        """In the parts that it came in: one growing piece would be copied and leave holes in
        memory.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            # Whatever it would become is not looked at.
            raise HTTPException(
                415,
                "compressed bodies are not accepted; send it as it is",
                {"accept-encoding": "identity"},
            )
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
                        raise HTTPException(413, f"the body is over {MAX_BYTES} bytes", _CLOSE)
                    self._budget.grow(holding, len(part))
        except TimeoutError:
            if not bound.expired():
                raise
            raise HTTPException(
                408, f"the body did not come within {RECEIVE_S:g} s", _CLOSE
            ) from None
        return body
