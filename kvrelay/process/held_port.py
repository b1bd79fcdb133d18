"""Holds a TCP port for a moment, to see whether it is free."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from kvrelay.process.tcp_address import socket_for


@contextlib.contextmanager
def held_port(address: str) -> Iterator[None]:
    """Listens at HOST:PORT during the body. Raises OSError if it cannot, for example because
    another process listens there.
    """
    listener, target = socket_for(address)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        # With SO_REUSEADDR, two sockets can bind an address, but only one can listen.
        listener.listen(1)
        yield
