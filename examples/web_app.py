"""Uses kvrelay in a web application. All requests share one client, and each answer is streamed to
the browser.

    pip install starlette uvicorn
    python examples/web_app.py
    curl -N "http://127.0.0.1:8080/story?about=a+fox"

A browser that disconnects cancels its request. The same code works in FastAPI.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import kvrelay


class State(TypedDict):
    client: kvrelay.AsyncClient


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[State]:
    async with kvrelay.AsyncClient(os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")) as client:
        yield {"client": client}


async def story(request: Request) -> Response:
    about = request.query_params.get("about", "a fox")
    stream = request.state.client.generate(
        f"Once upon a time there was {about}.", max_tokens=32, timeout=30.0
    )
    try:
        # An error before the first text can still set the HTTP status.
        first = await anext(stream)
    except kvrelay.KvRelayError as error:
        return JSONResponse({"error": error.message}, status_code=error.code.http_status)

    async def text() -> AsyncIterator[str]:
        async with stream:
            yield first.text
            async for event in stream:
                yield event.text

    return StreamingResponse(text(), media_type="text/plain")


app = Starlette(routes=[Route("/story", story)], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, port=8080)
