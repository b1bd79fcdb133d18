"""A gRPC port of the router, with bounds on connections, calls and memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.process.shared_port import claim_port
from kvrelay.process.tcp_address import cannot_listen
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import listen
from kvrelay.security.guard import RoleGuard
from router.api.grpc.auth import GrpcAccess
from router.api.grpc.health import HealthService
from router.api.grpc.io_threads import lower_priority
from router.api.grpc.messages import GrpcMessages
from router.api.http.connections.connection import MAX_HEAD_BYTES
from router.process import open_files

# Request size limit. It is several times a full context as text.
MAX_MESSAGE_BYTES = 4 * 2**20
# Bytes that gRPC receives of a call before its message is read.
RECEIVE_BYTES = 64 * 2**10
# Servers of one port.
MAX_SERVERS = 64
# Connections of one server. So many that 1000 at a port, which the kernel spreads unevenly, do not
# reach it on any server.
CONNECTIONS = 40
# Part of the limit on open files for the connections of a port. They may take a quarter more.
SHARE = 1 / 8
# Calls of one connection, and calls of one server that the event loop has not taken yet.
MAX_STREAMS = 128
MAX_PENDING = 2 * MAX_STREAMS
_CONNECTIONS = "grpc.max_allowed_incoming_connections"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC would receive megabytes of each call before anything reads its message. Without this,
    # hundreds of connections filled gigabytes, also without a valid token.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", RECEIVE_BYTES),
    # By default, gRPC cancels calls at random while more than 1000 are pending, not only those of
    # whoever sends a flood.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.so_reuseport", 1),
    # Keepalive detects a client that vanished, and ends its requests.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Timeout of the pings that measure bandwidth. gRPC's default is one minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # gRPC closes a connection that pings more often than every 5 s, after 2 strikes.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.keepalive_permit_without_calls", 1),
    (_CONNECTIONS, CONNECTIONS),
    # Most calls of a flood wait at their client, not before the calls of others.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # A call that has ended occupies memory until the event loop has seen its end. By default, gRPC
    # counts such calls as open and refuses calls of honest clients for them.
    ("grpc.http2.max_deallocating_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", MAX_HEAD_BYTES),
    # gRPC rejects at random between the soft and the hard limit, so both are equal.
    ("grpc.absolute_max_metadata_size", MAX_HEAD_BYTES),
    # Covers the TLS handshake and the first HTTP/2 settings.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Applies to connections without a call. Clients reconnect by themselves.
    ("grpc.max_connection_idle_ms", 15 * 60_000),
)


class GrpcListener:
    """A port that many gRPC servers in this process share. The kernel spreads the connections over
    them (SO_REUSEPORT).

    A gRPC server of Python takes its calls one after the other, one in several rounds of the event
    loop. With one server, a flood of calls delays the calls of all connections by seconds. With
    many, it delays those of the few connections that have the same server.
    """

    def __init__(
        self,
        address: str,
        option: str,
        services: tuple[str, ...],
        healthy: HealthService,
        access: GrpcAccess,
        messages: GrpcMessages,
        credentials: Credentials | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """Binds HOST:PORT. The servers have health and reflection, and are not started yet.

        `option` names the setting of `address` in errors. is_shared: other processes listen there,
        too, and the address has been claimed. Raises ConfigError if it is not available.

        If clients must show certificates, their certificates' roles apply. A certificate without a
        role has the role client, because the CA for clients signed it.
        """
        interceptors: list[grpc.aio.ServerInterceptor] = [access]
        if credentials is not None and credentials.files.ca is not None:
            interceptors.append(RoleGuard(without_role="client"))
        interceptors.append(messages)
        files = int(SHARE * open_files())
        servers = max(1, min(MAX_SERVERS, files * 5 // 4 // CONNECTIONS))
        options = dict(_OPTIONS)
        options[_CONNECTIONS] = min(options[_CONNECTIONS], files)
        host = address.rpartition(":")[0]
        self.address = address
        self._servers: list[grpc.aio.Server] = []
        # Of the port, until the servers have ended.
        self._claim: socket.socket | None = None
        try:
            # The servers share a port with any other process of this user that does so, too.
            if not is_shared:
                self._claim, self.address = claim_port(address)
            for _ in range(servers):
                server = grpc.aio.server(interceptors=interceptors, options=tuple(options.items()))
                self._servers.append(server)
                self.address = f"{host}:{listen(server, self.address, credentials)}"
        except (OSError, RuntimeError) as error:
            self._release()
            raise cannot_listen(option, address, error) from error
        self.add(health_pb2_grpc.add_HealthServicer_to_server, healthy)
        for server in self._servers:
            reflection.enable_server_reflection(
                (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )

    def add(self, register: Callable[[Any, grpc.aio.Server], object], service: object) -> None:
        """Adds a service by the function that gRPC generated for it."""
        for server in self._servers:
            register(service, server)

    async def start(self) -> None:
        """Starts to take calls."""
        for server in self._servers:
            await server.start()
        lower_priority()

    async def stop(self, grace_s: float) -> None:
        """Stops taking calls, and cancels those that have not ended after `grace_s` seconds."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.close()
