"""Sends requests over the OpenAI-compatible HTTP API, without retries, each on a new connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from kvrelay.client.connection import OPEN, Connection
from kvrelay.client.hints import ADDRESSES, NOTHING_LISTENS
from kvrelay.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvRelayError,
    NotFound,
    Unavailable,
    error_for,
)
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.row_json import ledger_from_json
from kvrelay.loadtest.senders import sse
from kvrelay.loadtest.stopwatch import Stopwatch
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.wire.inference import ModelInfo


class HttpSender:
    """Sends over HTTP. Raises InvalidArgument for a target that is not http://HOST:PORT or
    https://HOST:PORT, with or without `path`.
    """

    def __init__(
        self,
        target: str,
        timeout: float,
        connection: Connection = OPEN,
        path: str = "/v1",
        **options: Any,
    ) -> None:
        """`options` are added to the body of every request. `path`: what users know the target's
        address with, such as the base URL of OpenAI's client.
        """
        try:
            parts = urlsplit(target)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if (
            host is None
            or port is None
            or parts.scheme not in ("http", "https")
            or parts.path.rstrip("/") not in ("", path)
        ):
            raise InvalidArgument(
                f"{target!r:.200} is not a target; give http://HOST:PORT or https://HOST:PORT, "
                f"with or without {path}",
                field="target",
            )
        self._host, self._port, self._timeout = host, port, timeout
        self._tls = connection.ssl_context() if parts.scheme == "https" else None
        token = connection.token()
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # The name that requests send.
        self.model = ""
        self._options = options

    async def models(self) -> tuple[ModelInfo, ...]:
        """Returns the models that the target serves. Later requests name the first, unless `model`
        is set afterwards. Raises KvRelayError.
        """
        async with self._call("GET", "/v1/models") as response:
            try:
                models = await response.json()
            except (Internal, NotFound) as error:
                if response.status not in (200, 404):
                    raise
                raise NotFound(
                    f"that server has no /v1/models (HTTP {response.status}); {ADDRESSES['http']}"
                ) from error
            with _readable("/v1/models"):
                found = tuple(
                    ModelInfo(
                        str(one["id"]),
                        _count(one, "max_model_len"),
                        "",
                        "",
                        _count(one, "vocab_size"),
                        parent=str(one.get("parent") or ""),
                    )
                    for one in models.get("data") or ()
                )
        self.model = found[0].id if found else ""
        return found

    async def metrics(self) -> str:
        """Returns the text of /metrics. Raises KvRelayError."""
        async with self._call("GET", "/metrics") as response:
            if response.status != 200:
                raise NotFound(f"/metrics answers with HTTP {response.status}")
            return b"".join([piece async for piece in response.body]).decode(errors="replace")

    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends the request and returns its row; failures are rows too."""
        watch = Stopwatch(start, request.at)
        try:
            return await self.stream(request, watch, {})
        except KvRelayError as error:
            return watch.failed(error)

    async def complete(self, request: PlannedRequest, extra: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole answer. `extra` must switch off streaming. Raises KvRelayError."""
        async with self._call("POST", "/v1/completions", self._body(request) | extra) as response:
            return await response.json()

    async def stream(self, request: PlannedRequest, watch: Stopwatch, extra: dict[str, Any]) -> Row:
        """Streams the answer and returns the row. `extra` is added to the body of the request.
        Raises KvRelayError.
        """
        usage: dict[str, Any] = {}
        account: dict[str, Any] = {}
        finish_reason = ""
        async with self._call("POST", "/v1/completions", self._body(request) | extra) as response:
            async for event in response.events():
                with _readable("an event of the answer"):
                    usage = _object(event, "usage") or usage
                    account = _object(event, "kvrelay") or account
                    for choice in event.get("choices") or ():
                        finish_reason = str(choice.get("finish_reason") or finish_reason)
                        # A server that does not return token ids sends one token per piece of text.
                        watch.tokens(len(choice.get("token_ids") or ()) or bool(choice.get("text")))
            with _readable("the account of the answer"):
                return watch.answered(
                    output_tokens=_count(usage, "completion_tokens") or None,
                    prompt_tokens=_count(usage, "prompt_tokens"),
                    cached_tokens=_count(_object(usage, "prompt_tokens_details"), "cached_tokens"),
                    finish_reason=finish_reason,
                    path=response.headers.get("x-kvrelay-path", ""),
                    why=str(account.get("why") or ""),
                    request_id=str(account.get("request_id") or ""),
                    ledger=ledger_from_json(account.get("ledger")),
                )

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        return {
            "model": self.model,
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
    async def _call(
        self, method: str, path: str, body: Any = None
    ) -> AsyncIterator[sse.HttpResponse]:
        host = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, limit=2**20, ssl=self._tls
                )
                try:
                    yield await sse.request(reader, writer, host, method, path, body, self._headers)
                finally:
                    writer.close()
        except KvRelayError as error:
            raise error_for(error.code, f"{host}: {error.message}") from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{host}: the answer was not complete within {self._timeout:g} s"
            ) from error
        except ConnectionRefusedError as error:
            raise Unavailable(f"{host}: {NOTHING_LISTENS}") from error
        except OSError as error:
            raise Unavailable(f"{host}: {error.strerror or error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Converts errors from reading a foreign server's answer to Internal, because the answer may
    have any shape.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Internal(f"{what} is invalid: {error!r:.200}") from error


def _object(within: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a nested object; empty if it is missing or null. Raises TypeError if it is not an
    object.
    """
    found = within.get(name) or {}
    if not isinstance(found, dict):
        raise TypeError(f"{name} is {found!r:.40}, not an object")
    return found


def _count(within: dict[str, Any], name: str) -> int:
    """Returns a number of tokens; 0 if it is missing or null. Raises ValueError if it is not such a
    number.
    """
    found = within.get(name) or 0
    if not (isinstance(found, int) and 0 <= found < 2**63):
        raise ValueError(f"{name} is {found!r:.40}, not a number of tokens")
    return found
