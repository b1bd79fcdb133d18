"""The public gRPC endpoint: kvrelay.v1.InferenceService."""

from __future__ import annotations

import asyncio

import grpc

from kvrelay.clock import Clock
from kvrelay.errors import DeadlineExceeded, KvRelayError
from kvrelay.wire import status
from kvrelay.wire.inference import (
    GenerateRequest,
    InferenceServiceServicer,
    models_to_proto,
    pb,
    request_from_proto,
    response_to_proto,
)
from router.api.grpc.auth import caller
from router.frontend.frontend import Frontend
from router.frontend.waiting_room import WaitingRoom
from router.runtime.stream_reader import SLOW_READER_S, StreamReader

# Time after the deadline in which the client can read the remaining responses.
READ_GRACE_S = 1.0


class InferenceService(InferenceServiceServicer):
    """Generates text and lists models for clients."""

    def __init__(self, frontend: Frontend, clock: Clock, waiting_room: WaitingRoom) -> None:
        self._frontend = frontend
        self._clock = clock
        self._waiting_room = waiting_room

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the responses of one request. Cancels the request when the call ends. Aborts with
        the status of the KvRelayError, or DEADLINE_EXCEEDED if the client reads too slowly.
        """
        error: KvRelayError
        try:
            await self._answer(request_from_proto(request), context)
            return
        except TimeoutError:
            error = DeadlineExceeded(
                "the client did not read the answer before the deadline, or none of it for "
                f"{SLOW_READER_S:g} s"
            )
        except KvRelayError as caught:
            self._waiting_room.refused(caller.get().name)
            error = caught
        # Outside the handlers above, whose exceptions keep the answer. A client that does not read
        # delays its status too.
        await status.abort(context, error)

    async def _answer(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Raises TimeoutError if the client reads too slowly, and the request's KvRelayError."""
        arrival = self._clock.now()
        stream = await self._frontend.open(
            request, caller.get(), arrival, context.time_remaining(), _traceparent(context)
        )
        try:
            async with asyncio.timeout(stream.request.deadline - arrival + READ_GRACE_S):
                async for _, response in StreamReader([stream]).responses():
                    async with asyncio.timeout(SLOW_READER_S):
                        await context.write(response_to_proto(response))
        finally:
            self._frontend.cancel(stream)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """Lists the model that the cluster serves."""
        return models_to_proto([self._frontend.card.info])


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    return next(
        (value for key, value in context.invocation_metadata() or () if key == "traceparent"), ""
    )
