"""Sends requests over the OpenAI-compatible HTTP door, each once, on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from kvrelay.errors import DeadlineExceeded, Internal, InvalidArgument, KvRelayError, NotFound, Unavailable, error_for
from kvrelay.loadtest import sse
from kvrelay.loadtest.row import Row
from kvrelay.loadtest.row_json import ledger_from_json
from kvrelay.loadtest.stopwatch import Stopwatch
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.wire.inference import ModelInfo


class HttpSender:
    """Raises InvalidArgument for a target that is not http://HOST:PORT."""

    def __init__(self, target: str, timeout: float, **options: Any) -> None:
        """`options` go into the body of every request."""
        try:
            parts = urlsplit(target)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or port is None or parts.scheme != "http" or parts.path not in ("", "/"):
            raise InvalidArgument(f"{target!r} is not a target; give http://HOST:PORT", field="target")
        self._host, self._port, self._timeout = host, port, timeout
        self._model = ""
        self._options = options

    async def models(self) -> tuple[ModelInfo, ...]:
        async with self._call("GET", "/v1/models") as response:
            models = await response.json()
        found = tuple(
            ModelInfo(one["id"], one.get("max_model_len") or 0, "", "", one.get("vocab_size") or 0)
            for one in models.get("data", [])
        )
        self._model = found[0].id if found else ""
        return found

    async def metrics(self) -> str:
        """What /metrics answers. Raises KvRelayError."""
        async with self._call("GET", "/metrics") as response:
            if response.status != 200:
                raise NotFound(f"/metrics answers with HTTP {response.status}")
            return b"".join([piece async for piece in response.body]).decode(errors="replace")

    async def send(self, request: PlannedRequest, start: float) -> Row:
        watch = Stopwatch(start, request.at)
        try:
            return await self.stream(request, watch, {})
        except KvRelayError as error:
            return watch.failed(error)

    async def complete(self, request: PlannedRequest, extra: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, for a request that `extra` makes one without a stream. Raises KvRelayError."""
        async with self._call("POST", "/v1/completions", self._body(request) | extra) as response:
            return await response.json()

    async def stream(self, request: PlannedRequest, watch: Stopwatch, extra: dict[str, Any]) -> Row:
        """With `extra` in the request's body. Raises KvRelayError."""
        usage: dict[str, Any] = {}
        account: dict[str, Any] = {}
        finish_reason = ""
        async with self._call("POST", "/v1/completions", self._body(request) | extra) as response:
            async for event in response.events():
                usage = event.get("usage") or usage
                account = event.get("kvrelay") or account
                for choice in event.get("choices", []):
                    finish_reason = choice.get("finish_reason") or finish_reason
                    # A server that does not return ids sends one token with each piece of text.
                    watch.tokens(len(choice.get("token_ids") or ()) or bool(choice.get("text")))
        try:
            ledger = ledger_from_json(account.get("ledger"))
        except (KeyError, TypeError, ValueError) as error:
            raise Internal(f"the answer's ledger cannot be read: {error!r}") from error
        return watch.answered(
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            finish_reason=finish_reason,
            path=response.headers.get("x-kvrelay-path", ""),
            why=account.get("why", ""),
            request_id=account.get("request_id", ""),
            ledger=ledger,
        )

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": request.token_ids if request.prompt is None else request.prompt,
            "max_tokens": request.output_tokens,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self._options,
        }

    @asynccontextmanager
    async def _call(self, method: str, path: str, body: Any = None) -> AsyncIterator[sse.HttpResponse]:
        host = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**20)
                try:
                    yield await sse.request(reader, writer, host, method, path, body)
                finally:
                    writer.close()
        except KvRelayError as error:
            raise error_for(error.code, f"{host}: {error.message}") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{host}: no whole answer within {self._timeout:g} s") from error
        except OSError as error:
            raise Unavailable(f"{host}: {error.strerror or error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
