"""gRPC servers and channels, with TLS where there are credentials. Nothing else in the cluster
opens one.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvrelay.security.credentials import Credentials
from kvrelay.security.key_pair import KeyPair
from kvrelay.security.tls_roles import WORKER_NAME

Option = tuple[str, str | int]


def listen(server: grpc.aio.Server, address: str, credentials: Credentials | None) -> int:
    """Adds a port at HOST:PORT; returns its number. Raises RuntimeError if it cannot be had."""
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(credentials)))


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Each handshake takes the files as they are then. With a CA, who shows no certificate of it
    ends there.
    """
    shown = credentials.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        current = credentials.current()
        if current is shown:
            return None
        shown = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown), changed, require_client_authentication=shown.ca is not None
    )


def _configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], pair.ca)


def worker_channel(
    address: str, credentials: Credentials | None, options: Sequence[Option] = ()
) -> grpc.aio.Channel:
    """To a worker at HOST:PORT, of which the CA and the name of workers are verified, and not the
    address.

    It keeps the certificate that the files hold now; whoever connects anew makes a new channel.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    pair = credentials.current()
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(pair.ca, pair.key, pair.chain),
        (*options, ("grpc.ssl_target_name_override", WORKER_NAME)),
    )
