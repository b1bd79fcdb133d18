"""Checks that the router can listen on its addresses."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping

from kvrelay.config.listen import ENDPOINTS, ListenConfig
from kvrelay.errors import ConfigError
from kvrelay.process.held_port import held_port


def check_ports(listen: ListenConfig) -> None:
    """Raises ConfigError, which names all of them, if addresses are not free, or if two listeners
    have one port.
    """
    held: dict[str, str] = {}
    taken: dict[str, str] = {}
    problems: list[str] = []
    with contextlib.ExitStack() as sockets:
        for endpoint in ENDPOINTS:
            address: str = getattr(listen, endpoint)
            port = address.rpartition(":")[2]
            try:
                sockets.enter_context(held_port(address))
            except OSError as error:
                ports = {one.rpartition(":")[2] for one in held.values()}
                if error.errno == errno.EADDRINUSE and port not in ports:
                    taken[endpoint] = address
                else:
                    problems.append(_message(endpoint, address, held, error))
            else:
                held[endpoint] = address
    if taken:
        problems.insert(0, _taken(taken))
    if problems:
        raise ConfigError(". ".join(problems))


def _taken(addresses: Mapping[str, str]) -> str:
    """Says that other processes have these addresses, by listener, and what to do."""
    names = ", ".join(f"listen.{endpoint}" for endpoint in addresses)
    options = ", ".join(f"listen.{endpoint} (--{endpoint}-port)" for endpoint in addresses)
    return (
        f"{names}: cannot listen on {', '.join(addresses.values())}: "
        f"{os.strerror(errno.EADDRINUSE)}; if a cluster runs already, use it or stop it; otherwise "
        f"set {options} to {'a free port' if len(addresses) == 1 else 'free ports'} or to 0"
    )


def _message(endpoint: str, address: str, held: dict[str, str], error: OSError) -> str:
    """Says why `endpoint` cannot have `address`, and what to do. `held`: the addresses that this
    check holds, by listener.
    """
    port = address.rpartition(":")[2]
    other = f"set --{endpoint}-port to another port or to 0"
    if error.errno == errno.EADDRINUSE:
        for holder, taken in held.items():
            if taken.rpartition(":")[2] == port:
                also = "" if taken == address else f", {taken}"
                return f"listen.{endpoint}: {address} is listen.{holder} too{also}; {other}"
    reason = error.strerror or str(error)
    hint = {
        errno.EACCES: f"{other}; ports below 1024 need the capability CAP_NET_BIND_SERVICE",
    }.get(
        error.errno or 0,
        f"set the host of listen.{endpoint} to an address of this machine, 127.0.0.1 for instance",
    )
    return f"listen.{endpoint}: cannot listen on {address}: {reason}; {hint}"
