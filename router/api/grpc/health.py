"""The gRPC health service, grpc.health.v1.Health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.errors import NotFound


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Tells whether the listener's services serve.

    The servicer of grpc_health is not used: in its Watch, the end of one watcher cuts off the
    others, and a watcher that does not read blocks every change.
    """

    def __init__(self, services: Iterable[str], serving: bool) -> None:
        """`services`: the names that clients can ask for. The empty name stands for all."""
        self._services = frozenset(services) | {""}
        self._serving = serving
        self._changed = asyncio.Event()

    def set(self, serving: bool) -> None:
        """Changes the status and notifies the watchers."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Returns the status of a service. Raises NotFound for an unknown one."""
        if request.service not in self._services:
            known = ", ".join(sorted(self._services - {""}))
            raise NotFound(f"unknown service; the known ones are {known}")
        return self._response(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the status of a service now and at every change, until the client ends the
        call.
        """
        last = None
        while True:
            changed, response = self._changed, self._response(request.service)
            if response != last:
                await context.write(response)
            last = response
            await changed.wait()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if service not in self._services:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._serving else kinds.NOT_SERVING)
