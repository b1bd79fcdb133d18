"""The credentials of a command: its token and its TLS files. They come from files, because every
user of the machine can see the arguments of a command.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvrelay.errors import InvalidArgument

_MAX_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Connection:
    """`tls_ca` switches on TLS for HOST:PORT. A client certificate may be used in addition.

    Raises InvalidArgument for options that do not fit together, and when a file cannot be read or
    used. No error message contains the content of a file.
    """

    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument(
                "--tls-cert and --tls-key must be given together", field="tls_cert"
            )
        if self.tls_cert is not None and self.tls_ca is None:
            raise InvalidArgument("--tls-cert requires --tls-ca", field="tls_cert")

    def token(self) -> str | None:
        """Reads the token; None without a token file. Raises InvalidArgument if the file does not
        hold one token.
        """
        if self.token_file is None:
            return None
        text = _read(self.token_file, "--token-file").decode("ascii", "replace").strip()
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise InvalidArgument(
                f"--token-file {self.token_file} does not contain exactly one token; write the "
                "token alone into the file",
                field="token_file",
            )
        return text

    def tls(self) -> bool | grpc.ChannelCredentials:
        """Returns the value for the clients' `tls` argument. Raises InvalidArgument if a file
        cannot be read, or if the CA file contains no certificate.
        """
        if self.tls_ca is None:
            return False
        ca = _read(self.tls_ca, "--tls-ca")
        _check_authority(self.tls_ca, ca)
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(
            ca, _read(self.tls_key, "--tls-key"), _read(self.tls_cert, "--tls-cert")
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Returns a context for https. Without a CA, it trusts the authorities that this machine
        trusts. Raises InvalidArgument if a file cannot be used.
        """
        if self.tls_ca is not None:
            _check_authority(self.tls_ca, _read(self.tls_ca, "--tls-ca"))
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:
            # ssl.SSLError is an OSError.
            raise InvalidArgument(
                f"--tls-cert {self.tls_cert} and --tls-key {self.tls_key} cannot be used: {error}; "
                "give a certificate and its key in PEM",
                field="tls_cert",
            ) from None
        return context


OPEN = Connection()


def _check_authority(path: Path, content: bytes) -> None:
    """Raises InvalidArgument unless the content is PEM certificates."""
    try:
        ssl.create_default_context(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise InvalidArgument(
            f"--tls-ca {path} contains no PEM certificate (-----BEGIN CERTIFICATE-----); give the "
            "file of the CA that signed the server's certificate",
            field="tls_ca",
        ) from None


def _read(path: Path, option: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(
            f"{option} {path} cannot be read: {error.strerror}", field=option
        ) from None
    if len(content) > _MAX_BYTES:
        raise InvalidArgument(
            f"{option} {path} is larger than the allowed {_MAX_BYTES} bytes", field=option
        )
    return content
