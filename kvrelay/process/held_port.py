"""Holds a TCP port for a moment, to see whether it is free."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(address: str) -> Iterator[None]:
    """Listens at HOST:PORT during the body. Raises OSError if it cannot, for example because
    another process listens there.
    """
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        # With SO_REUSEADDR, two sockets can bind an address, but only one can listen.
        listener.listen(1)
        yield
