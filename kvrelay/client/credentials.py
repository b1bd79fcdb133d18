"""What a client shows a router, and whom it trusts: bearer token and TLS."""

from __future__ import annotations

import os
from typing import TypeAlias

import grpc

from kvrelay.errors import InvalidArgument

Tls: TypeAlias = bool | bytes | str | os.PathLike[str] | grpc.ChannelCredentials
_MAX_PEM_BYTES = 2**20


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of each call. White space around the token, for example the last newline
    of a file, is removed. Raises InvalidArgument for a token that is not one word of printable
    ASCII.
    """
    if token is None:
        return ()
    word = token.strip()
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise InvalidArgument(
            "token is not one word of printable ASCII; give the content of the token file",
            field="token",
        )
    return (("authorization", f"Bearer {word}"),)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """Returns the channel credentials for `tls`, or None without TLS. Raises InvalidArgument for a
    value of another type, an unreadable file, or content without a certificate.
    """
    if tls is False or tls is None:
        return None
    if tls is True:
        return grpc.ssl_channel_credentials()
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    if not isinstance(tls, bytes | str | os.PathLike):
        kind = type(tls).__name__
        raise InvalidArgument(
            f"tls has type {kind}; allowed are bool, the path or content of a PEM file, and "
            "grpc.ChannelCredentials",
            field="tls",
        )
    name, content = (
        ("the given bytes", tls) if isinstance(tls, bytes) else (os.fspath(tls), _read(tls))
    )
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise InvalidArgument(
            f"tls: {name} contains no PEM certificate; give the certificate of the CA that signed "
            "the server's",
            field="tls",
        )
    return grpc.ssl_channel_credentials(content)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_PEM_BYTES)
    except OSError as error:
        raise InvalidArgument(
            f"tls: {os.fspath(path)} cannot be read: {error.strerror}", field="tls"
        ) from None
