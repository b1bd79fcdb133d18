"""A request's body: read within bounds of size, time and memory, and parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvrelay.errors import ResourceExhausted
from router.openai_request import Json, load_json

MAX_BYTES = 4 * 2**20
MAX_HELD_BYTES = 256 * 2**20  # of all bodies that are here and not parsed yet
RECEIVE_S = 20.0  # for a body to come
INLINE_BYTES = 2**16  # so many are parsed before a thread would have begun
_CLOSE = {"connection": "close"}  # what is left of the body need not come
T = TypeVar("T")


class Bodies:
    """Reads the bodies of one listener's requests."""

    def __init__(self) -> None:
        self._held = 0

    async def parsed(self, request: Request, parse: Callable[[Json, str], T]) -> T:
        """What `parse` makes of the body and of the id that the request has been given.

        A large body is parsed beside the event loop, where streams go on meanwhile. Raises HTTPException for a body
        that is too large or too slow, ResourceExhausted while too many are here, InvalidArgument.
        """
        body = bytearray()
        try:
            await self._read(request, body)
            if len(body) <= INLINE_BYTES:
                return parse(load_json(bytes(body)), request.state.request_id)
            return await asyncio.to_thread(lambda: parse(load_json(bytes(body)), request.state.request_id))
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        if request.headers.get("content-encoding", "identity") != "identity":
            # Whatever it would become is not looked at.
            raise HTTPException(
                415, "compressed bodies are not accepted; send it as it is", {"accept-encoding": "identity"}
            )
        try:
            async with asyncio.timeout(RECEIVE_S):
                async for part in request.stream():
                    body += part
                    self._held += len(part)
                    if len(body) > MAX_BYTES:
                        raise HTTPException(413, f"the body is over {MAX_BYTES} bytes", _CLOSE)
                    if self._held > MAX_HELD_BYTES:
                        raise ResourceExhausted("too many large bodies at one time", retry_after_s=1.0)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {RECEIVE_S:g} s", _CLOSE) from None
