"""Sends requests to a prefill/decode pair of vLLM: first to the prefill server, then, with the KV
parameters of its answer, to the decode server.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from kvrelay.errors import Internal, KvRelayError
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.loadtest.stopwatch import Stopwatch
from kvrelay.loadtest.workload import PlannedRequest

_ASK_FOR_KV: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmPairSender:
    """All tokens, including the first, come from the decode server, as in vLLM's example proxy for
    its NixlConnector.
    """

    def __init__(self, prefill: str, decode: str, timeout: float, **options: Any) -> None:
        """prefill and decode: http://HOST:PORT. `options` are added to the body of every
        request.
        """
        self._prefill = HttpSender(prefill, timeout, **options)
        self._decode = HttpSender(decode, timeout, **options)

    async def models(self) -> None:
        """Queries both servers. Raises KvRelayError."""
        await self._prefill.models()
        await self._decode.models()

    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends the request and returns its row; failures are rows too."""
        watch = Stopwatch(start, request.at)
        first = {
            "max_tokens": 1,
            "stream": False,
            "stream_options": None,
            "kv_transfer_params": _ASK_FOR_KV,
        }
        try:
            prefilled = await self._prefill.complete(request, first)
            where = prefilled.get("kv_transfer_params")
            if where is None:
                raise Internal(
                    "the prefill server returned no kv_transfer_params; start it with "
                    "--kv-transfer-config"
                )
            return await self._decode.stream(request, watch, {"kv_transfer_params": where})
        except KvRelayError as error:
            return watch.failed(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None
