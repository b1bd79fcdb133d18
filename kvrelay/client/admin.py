"""The operator's client: reads the state of a cluster and controls its pools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import grpc

from kvrelay.client.base_client import channel_options, check_target
from kvrelay.client.credentials import Tls, bearer, channel_credentials
from kvrelay.client.hints import with_hint
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.wire import cluster as wire
from kvrelay.wire.adapters import AdapterStatus, adapter_from_proto
from kvrelay.wire.encoding.fields import said
from kvrelay.wire.status import error_from_rpc

# Keepalive pings end `watch` when the router disappears without closing the connection. kvrelay's
# servers accept a ping every 5 s.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Timeout of the pings that gRPC sends to measure bandwidth. The default is one minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
)
# The router gives the workers a minute to load an adapter.
_LOAD_S = 90.0


class AdminClient:
    """A blocking client of a cluster's admin listener. Every call is made once and takes at most
    `timeout` seconds; `load_adapter` may take longer.

    token, tls: as for Client; the token must have the role admin. model: the name of one of several
    models, which all calls are about. Raises InvalidArgument for a target that is not HOST:PORT.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50052",
        *,
        timeout: float = 10.0,
        token: str | None = None,
        tls: Tls = False,
        model: str = "",
    ) -> None:
        check_target(target, "admin")
        self.target = target
        self.model = model
        self._timeout = timeout
        self._metadata = bearer(token)
        credentials = channel_credentials(tls)
        self._tls = credentials is not None
        options = (*channel_options(target), *_KEEPALIVE)
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._stub = wire.ClusterServiceStub(self._channel)

    def status(self) -> wire.ClusterStatus:
        """Returns the status of the cluster. Raises KvRelayError if the call fails, and NotFound if
        a router of an earlier release serves another model.
        """
        with self._errors():
            found = wire.cluster_status_from_proto(
                self._stub.GetStatus(
                    wire.status_request(self.model),
                    timeout=self._timeout,
                    metadata=self._metadata,
                )
            )
        # Earlier routers serve one model and know no other.
        if self.model and not found.models and found.model != self.model:
            raise NotFound(
                f"{self.target}: model {self.model!r:.100} does not exist; this cluster serves "
                f"{found.model!r:.100}",
                field="model",
            )
        return found

    def watch(self, interval_seconds: float = 1.0) -> Iterator[wire.ClusterStatus]:
        """Yields the status now and after each interval, until the caller closes the iterator.

        Raises Unavailable when the router is gone. A router that disappears without closing the
        connection is detected within 15 s.
        """
        request = wire.pb.WatchStatusRequest(interval_seconds=interval_seconds, model=self.model)
        call = self._stub.WatchStatus(request, metadata=self._metadata)
        try:
            with self._errors():
                for message in call:
                    yield wire.cluster_status_from_proto(message)
        finally:
            call.cancel()

    def set_pool_size(
        self, *, prefill: int | None = None, decode: int | None = None, reason: str = ""
    ) -> tuple[int, int]:
        """Sets the desired number of workers. None leaves a pool unchanged. Returns the desired
        sizes of both pools: (prefill, decode). `reason` is kept in the scaling history.
        """
        self._check_model()
        with self._errors():
            response = self._stub.SetPoolSize(
                wire.pb.SetPoolSizeRequest(
                    prefill=prefill, decode=decode, model=self.model, reason=reason
                ),
                timeout=self._timeout,
                metadata=self._metadata,
            )
        return response.prefill, response.decode

    def _check_model(self) -> None:
        """Raises NotFound before a router of an earlier release changes another model."""
        if self.model:
            self.status()

    def drain(self, worker_id: str) -> None:
        """Lets a worker finish its requests, then stops the worker. Returns when the drain has
        begun.
        """
        with self._errors():
            request = wire.pb.DrainWorkerRequest(worker_id=worker_id)
            self._stub.DrainWorker(request, timeout=self._timeout, metadata=self._metadata)

    def restart(self, *names: str) -> tuple[str, ...]:
        """Replaces the named workers, the workers of the named pools, or all workers, one at a time
        in each pool.

        Returns the names of the workers when the restart has begun. Each status lists the workers
        that still have to be replaced.
        """
        self._check_model()
        with self._errors():
            response = self._stub.RestartWorkers(
                wire.pb.RestartWorkersRequest(names=names, model=self.model),
                timeout=self._timeout,
                metadata=self._metadata,
            )
        return tuple(response.worker_ids)

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """Returns the LoRA adapters, those of the configuration first."""
        with self._errors():
            response = self._stub.ListAdapters(
                wire.pb.ListAdaptersRequest(model=self.model),
                timeout=self._timeout,
                metadata=self._metadata,
            )
        return tuple(map(adapter_from_proto, response.adapters))

    def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Loads the adapter in the folder `path`, which the router and all workers read. Returns
        when requests may name it as their model, or raises the reason; then no worker has it.
        """
        with self._errors():
            response = self._stub.LoadAdapter(
                wire.pb.LoadAdapterRequest(name=name, path=path, model=self.model),
                timeout=max(self._timeout, _LOAD_S),
                metadata=self._metadata,
            )
        return adapter_from_proto(response.adapter)

    def unload_adapter(self, name: str) -> None:
        """Stops serving an adapter. Requests that run with it go on to their end."""
        with self._errors():
            request = wire.pb.UnloadAdapterRequest(name=name, model=self.model)
            self._stub.UnloadAdapter(request, timeout=self._timeout, metadata=self._metadata)

    def close(self) -> None:
        """Closes the channel."""
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
            typed = error_from_rpc(error, self.target)
            raise with_hint(typed, self.target, "admin", tls=self._tls) from None
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the request cannot be sent: {said(error)}") from error
