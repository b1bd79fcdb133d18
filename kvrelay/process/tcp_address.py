"""Sockets for the addresses of listeners, and the error for an address that is not available."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

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


def unreachable(addresses: Iterable[str], timeout_s: float = 1.0) -> list[str]:
    """Those of the addresses HOST:PORT that take no connection now. Asks all at the same time."""

    def connects(address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
                return True
        except OSError:
            return False

    asked = list(addresses)
    with ThreadPoolExecutor(max_workers=max(1, len(asked))) as threads:
        return [
            one for one, does in zip(asked, threads.map(connects, asked), strict=True) if not does
        ]


def cannot_listen(option: str, address: str, error: Exception) -> ConfigError:
    """Returns the error for an address that is not available. option: the setting that names it."""
    return ConfigError(
        f"{option}: cannot listen on {address}: {error}; end the process that listens there, or "
        "choose another port"
    )
