"""TLS and authentication."""

from __future__ import annotations

from kvrelay.config.section import FilePath, Section


class KeyPairConfig(Section):
    """PEM files. Each file is read by the processes that use it."""

    # The certificate, followed by the intermediate certificates up to the CA.
    cert: FilePath
    # Without a password.
    key: FilePath


class PublicKeyPairConfig(KeyPairConfig):
    """PEM files of the listeners for clients."""

    # Clients must present a certificate that this CA signed. null: no client certificate.
    client_ca: FilePath | None = None


class TlsConfig(Section):
    """Certificates of the connections inside the cluster, which use mutual TLS, and of the
    connections from clients.
    """

    # Signs the certificate of every component.
    ca: FilePath
    # For routers and controllers.
    router: KeyPairConfig
    worker: KeyPairConfig
    # The certificate for clients; null: the router's.
    public: PublicKeyPairConfig | None = None


class SecurityConfig(Section):
    """TLS and authentication."""

    tls: TlsConfig | None = None
    # The tenants and their tokens.
    tokens_file: FilePath | None = None
