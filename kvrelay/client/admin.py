"""The operator's client: what a cluster is doing, and the hand on its pools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import grpc

from kvrelay.client.base import CHANNEL_OPTIONS, Tls, bearer, channel_credentials, check_target
from kvrelay.client.hints import with_hint
from kvrelay.wire import cluster as wire
from kvrelay.wire.status import error_from_rpc

# A router that vanished without a word ends `watch`. Servers of kvrelay bear a ping each 5 s.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Of those that gRPC sends to measure bandwidth, by default a minute
    ("grpc.http2.ping_timeout_ms", 5_000),
)


class AdminClient:
    """A blocking client of a cluster's admin listener. Every call is made once and takes at most
    `timeout` seconds.

    token, tls: as Client takes them; the token is one with the role admin.

    Raises InvalidArgument for a target that is not HOST:PORT.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50052",
        *,
        timeout: float = 10.0,
        token: str | None = None,
        tls: Tls = False,
    ) -> None:
        check_target(target)
        self.target = target
        self._timeout = timeout
        self._metadata = bearer(token)
        credentials = channel_credentials(tls)
        options = (*CHANNEL_OPTIONS, *_KEEPALIVE)
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._stub = wire.ClusterServiceStub(self._channel)

    def status(self) -> wire.ClusterStatus:
        with self._errors():
            return wire.cluster_status_from_proto(
                self._stub.GetStatus(
                    wire.status_request(), timeout=self._timeout, metadata=self._metadata
                )
            )

    def watch(self, interval_seconds: float = 1.0) -> Iterator[wire.ClusterStatus]:
        """The status now and after each interval, until the caller has had enough.

        Raises Unavailable when the router is gone; one that vanished without a word is noticed
        within 15 s.
        """
        request = wire.pb.WatchStatusRequest(interval_seconds=interval_seconds)
        call = self._stub.WatchStatus(request, metadata=self._metadata)
        try:
            with self._errors():
                for message in call:
                    yield wire.cluster_status_from_proto(message)
        finally:
            call.cancel()

    def set_pool_size(
        self, *, prefill: int | None = None, decode: int | None = None
    ) -> tuple[int, int]:
        """Sets the wanted number of workers; None leaves a pool alone. Returns both, (prefill,
        decode).
        """
        with self._errors():
            response = self._stub.SetPoolSize(
                wire.pb.SetPoolSizeRequest(prefill=prefill, decode=decode),
                timeout=self._timeout,
                metadata=self._metadata,
            )
        return response.prefill, response.decode

    def drain(self, worker_id: str) -> None:
        """Lets a worker finish what it holds, then stops it; returns when it has begun."""
        with self._errors():
            request = wire.pb.DrainWorkerRequest(worker_id=worker_id)
            self._stub.DrainWorker(request, timeout=self._timeout, metadata=self._metadata)

    def restart(self, *names: str) -> tuple[str, ...]:
        """Replaces the named workers, those of the named pools, or all, one at a time in each pool.

        Returns their names when it has begun; what is left of them to replace is in each status.
        """
        with self._errors():
            response = self._stub.RestartWorkers(
                wire.pb.RestartWorkersRequest(names=names),
                timeout=self._timeout,
                metadata=self._metadata,
            )
        return tuple(response.worker_ids)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise with_hint(error_from_rpc(error, self.target)) from error
