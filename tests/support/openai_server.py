"""An OpenAI-compatible server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

WHY = "5 uncached prompt tokens are below local_below_tokens=64"


def sse(*events: Any) -> StreamingResponse:
    async def body() -> AsyncIterator[str]:
        for event in events:
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"

    return StreamingResponse(
        body(), media_type="text/event-stream", headers={"x-kvrelay-path": "local"}
    )


def answer(body: dict[str, Any]) -> list[Any]:
    steps: list[Any] = [
        {"choices": [{"text": f" t{n}", "token_ids": [n], "finish_reason": None}]}
        for n in range(body["max_tokens"] - 1)
    ]
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 1}}
    return [
        *steps,
        {"choices": [{"text": "", "token_ids": [9], "finish_reason": "length"}]},
        {"choices": [], "usage": usage, "kvrelay": {"path": "local", "why": WHY}},
        "[DONE]",
    ]


class HttpServer:
    """Answers completions as asked, unless `replies` holds something else to say."""

    def __init__(self, vocab_size: int | None = 50) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.replies: list[Response] = []
        self.model: dict[str, Any] = {"id": "demo", "max_model_len": 4096} | (
            {"vocab_size": vocab_size} if vocab_size else {}
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [self.model] if self.model else []})

    async def completions(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return self.replies.pop(0) if self.replies else sse(*answer(self.bodies[-1]))


@contextmanager
def http_serving(server: HttpServer) -> Iterator[str]:
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", ws="none", lifespan="off"
        )
        running = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join(10)
