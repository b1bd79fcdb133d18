"""Sends requests over gRPC, without retries."""

from __future__ import annotations

import asyncio
from itertools import cycle
from types import TracebackType
from typing import Self

from kvrelay.client import AsyncClient, RetryPolicy
from kvrelay.client.connection import Connection
from kvrelay.errors import KvRelayError
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.stopwatch import Stopwatch
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.wire.inference import ModelInfo

# As a load of many users has several. Processes of a router share the connections of a port.
CONNECTIONS = 8


class GrpcSender:
    """Sends over gRPC, on CONNECTIONS connections in turn. Raises InvalidArgument for a target that
    is not HOST:PORT.
    """

    def __init__(self, target: str, timeout: float, connection: Connection) -> None:
        # The name that requests send; empty for the only model.
        self.model = ""
        self._clients = [
            AsyncClient(
                target,
                timeout=timeout,
                retry=RetryPolicy(max_attempts=1),
                token=connection.token(),
                tls=connection.tls(),
            )
            for _ in range(CONNECTIONS)
        ]
        self._turns = cycle(self._clients)

    async def models(self) -> tuple[ModelInfo, ...]:
        """Returns the models that the target serves. Raises KvRelayError."""
        return await self._clients[0].models()

    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends the request and returns its row; failures are rows too."""
        watch = Stopwatch(start, request.at)
        stream = next(self._turns).generate(
            request.prompt,
            token_ids=request.token_ids,
            model=self.model,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            seed=request.seed,
        )
        try:
            async with stream:
                async for event in stream:
                    watch.tokens(len(event.token_ids))
                answer = await stream.result()
        except KvRelayError as error:
            return watch.failed(error)
        return watch.answered(
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=answer.usage.cached_tokens,
            finish_reason=answer.finish_reason,
            path=answer.path or "",
            why=answer.why,
            request_id=answer.request_id,
            ledger=answer.ledger,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(one.close() for one in self._clients))
