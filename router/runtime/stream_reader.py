"""Reading of streams as their tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from kvrelay.wire.inference import GenerateResponse
from router.runtime.stream import Stream, to_raise

# Time in which a client must take some of an answer.
SLOW_READER_S = 60.0


class StreamReader:
    """Reads the streams of one client together. Between two responses it waits for its turn at the
    write scheduler.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        """The streams are of one tenant. Each has one reader at a time."""
        self._streams = streams
        self._scheduler = streams[0].write_scheduler
        self._tenant = streams[0].request.tenant.name
        # Indexes of the streams with something to take, in the order of their news.
        self._ready: dict[int, None] = {}
        # Set while the reader waits for news.
        self._turn: asyncio.Future[None] | None = None

    async def responses(self) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
        """Yields (index of the stream, response) up to the last response of each stream. Raises the
        first error that ended a stream, after the stream's tokens.
        """
        for index, stream in enumerate(self._streams):
            if stream.ended is None:
                stream.on_news = partial(self._news, index)
            if stream.has_news:
                self._ready[index] = None
        remaining = len(self._streams)
        while remaining:
            await self._next_turn()
            for _ in range(len(self._ready)):
                index = next(iter(self._ready))
                del self._ready[index]
                stream = self._streams[index]
                # Read once: the end may come while the client processes the response.
                end = stream.ended
                response = stream.take()
                if is_partial := stream.is_partly_taken:
                    self._ready[index] = None
                if response is not None:
                    yield index, response
                if end is None or is_partial:
                    continue
                if end.error is not None:
                    raise to_raise(end.error)
                remaining -= 1

    async def _next_turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        if self._ready:
            self._scheduler.queue(turn, self._tenant)
        else:
            self._turn = turn
        await turn

    def _news(self, index: int) -> None:
        self._ready[index] = None
        if self._turn is not None:
            self._scheduler.queue(self._turn, self._tenant)
            self._turn = None
