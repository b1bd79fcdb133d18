"""The address at which vLLM's NixlConnector answers handshakes. Does not import vLLM."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.loopback import is_loopback


@contextmanager
def side_channel(host: str) -> Iterator[int]:
    """Chooses a free port of `host`, and tells vLLM by environment variables. vLLM has to start
    within the context, which keeps the port from other processes. Yields the port.

    NIXL's UCX listens on the loopback device alone if `host` is a loopback address.
    """
    host = host.strip("[]")
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as held:
        # ZeroMQ binds to the same port with this option, as long as nobody listens on it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        port: int = held.getsockname()[1]
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        if is_loopback(f"{host}:0"):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        yield port
