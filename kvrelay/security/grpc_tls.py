"""gRPC servers and channels, with TLS if there are credentials. All gRPC connections of the cluster
are opened here.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvrelay.security.credentials import Credentials
from kvrelay.security.key_pair import KeyPair
from kvrelay.security.tls_roles import WORKER_NAME

Option = tuple[str, str | int]


def listen(server: grpc.aio.Server, address: str, credentials: Credentials | None) -> int:
    """Adds a listener at HOST:PORT and returns its port. Raises RuntimeError if the address is not
    available.
    """
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(credentials)))


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Returns server credentials. Each handshake uses the current files. If there is a CA, a client
    without a certificate of that CA fails the handshake.
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
    """Returns a channel to a worker at HOST:PORT. TLS verifies the CA and the common name of all
    workers, not the address.

    The channel keeps the certificate that the files hold now. Create a new channel for each
    reconnection.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    pair = credentials.current()
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(pair.ca, pair.key, pair.chain),
        (*options, ("grpc.ssl_target_name_override", WORKER_NAME)),
    )
