"""The public gRPC endpoint: kvrelay.v1.InferenceService."""

from __future__ import annotations

import asyncio

import grpc

from kvrelay.clock import Clock
from kvrelay.errors import DeadlineExceeded, KvRelayError
from kvrelay.wire.inference import (
    GenerateRequest,
    InferenceServiceServicer,
    models_to_proto,
    pb,
    request_from_proto,
    response_to_proto,
)
from router.api.grpc.auth import caller
from router.catalogue import Catalogue
from router.frontend.frontend import Frontend
from router.frontend.waiting_room import WaitingRoom
from router.runtime.stream import Stream
from router.runtime.stream_reader import SLOW_READER_S, StreamReader


class InferenceService(InferenceServiceServicer):
    """Generates text and lists models for clients."""

    def __init__(self, catalogue: Catalogue, clock: Clock, waiting_room: WaitingRoom) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._waiting_room = waiting_room

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the responses of one request. Cancels the request when the call ends. Raises the
        request's KvRelayError, and DeadlineExceeded if the client reads too slowly. `GrpcMessages`
        sends the error.
        """
        try:
            await self._answer(request_from_proto(request), context)
        except KvRelayError:
            self._waiting_room.refused(caller.get().name)
            raise

    async def _answer(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Writes the responses. Raises the request's KvRelayError, and DeadlineExceeded if the
        client reads too slowly.
        """
        arrival, tenant = self._clock.now(), caller.get()
        frontend = self._catalogue.find(request.model).frontend
        stream = None
        try:
            stream = await frontend.open(
                request, tenant, arrival, context.time_remaining(), _traceparent(context)
            )
            await self._write(frontend, stream, context)
        except asyncio.CancelledError:
            if stream is None or stream.first_handed_at is None:
                self._waiting_room.refused(tenant.name)
            raise
        finally:
            if stream is not None:
                frontend.cancel(stream)

    async def _write(
        self, frontend: Frontend, stream: Stream, context: grpc.aio.ServicerContext
    ) -> None:
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            frontend.cancel(stream)
            stream.drop()

        async for _, response in StreamReader([stream]).responses():
            slow = asyncio.get_running_loop().call_later(SLOW_READER_S, leave)
            try:
                # gRPC cannot end a call properly after a write that was cancelled.
                await context.write(response_to_proto(response))
            finally:
                slow.cancel()
            if left:
                raise DeadlineExceeded(
                    f"the client did not read the answer for {SLOW_READER_S:g} s"
                )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """Lists the models that the cluster serves, and their adapters."""
        return models_to_proto([info for one in self._catalogue for info in one.card.models])


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    return next(
        (value for key, value in context.invocation_metadata() or () if key == "traceparent"), ""
    )
