"""A TCP port that several processes share (SO_REUSEPORT). The kernel spreads new connections over
the processes that listen.
"""

from __future__ import annotations

import socket

from kvrelay.process.held_port import held_port
from kvrelay.process.tcp_address import socket_for


def claim_port(address: str) -> tuple[socket.socket, str]:
    """Binds HOST:PORT, without listening, so that other processes of this user can listen there
    with SO_REUSEPORT and processes without it cannot.

    Returns the socket, which holds the claim until it is closed, and HOST:PORT, with the port that
    the kernel chose for port 0. Raises OSError, also if another process listens there already.
    """
    host, _, port = address.rpartition(":")
    if int(port):
        # A listener with SO_REUSEPORT would not notice others.
        with held_port(address):
            pass
    claim, target = socket_for(address)
    try:
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        share(claim)
        claim.bind(target)
    except OSError:
        claim.close()
        raise
    return claim, f"{host}:{claim.getsockname()[1]}"


def share(listener: socket.socket) -> None:
    """Lets other processes of this user listen at the same port. Call it before bind."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
