"""A TCP port that several processes share (SO_REUSEPORT). The kernel spreads new connections over
the processes that listen.
"""

from __future__ import annotations

import socket

from kvrelay.process.tcp_address import socket_for


def claim_port(address: str) -> tuple[socket.socket, str]:
    """Binds HOST:PORT, without listening, so that other sockets of this user can listen there with
    SO_REUSEPORT and sockets without it cannot. Only one socket has the claim of a port.

    Returns the socket, which holds the claim until it is closed, and HOST:PORT, with the port that
    the kernel chose for port 0. Raises OSError, also if another process listens there already.
    """
    host, _, port = address.rpartition(":")
    # Nobody else has a port that the kernel chooses.
    is_named = int(port) != 0
    claim, target = socket_for(address)
    try:
        if is_named:
            # Connections of an earlier listener may still end there. With SO_REUSEADDR, several
            # sockets can bind an address, but only one can listen.
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.bind(target)
        if is_named:
            claim.listen(1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        share(claim)
        if is_named:
            # It stays bound.
            claim.shutdown(socket.SHUT_RDWR)
    except OSError:
        claim.close()
        raise
    return claim, f"{host}:{claim.getsockname()[1]}"


def share(listener: socket.socket) -> None:
    """Lets other sockets of this user listen at the same port. Call it before they bind."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
