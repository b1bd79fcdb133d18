"""Sockets for the addresses of listeners, and the error for an address that is not available."""

from __future__ import annotations

import socket

from kvrelay.errors import ConfigError


def socket_for(address: str) -> tuple[socket.socket, tuple[object, ...]]:
    """Returns a TCP socket that is not bound yet for HOST:PORT, and what it can be bound to. Raises
    OSError if the host has no address.
    """
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )[0]
    return socket.socket(family, kind, protocol), target


def cannot_listen(option: str, address: str, error: Exception) -> ConfigError:
    """Returns the error for an address that is not available. option: the setting that names it."""
    return ConfigError(
        f"{option}: cannot listen on {address}: {error}; end the process that listens there, or "
        "choose another port"
    )
