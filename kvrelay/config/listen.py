"""The addresses of the listeners."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from kvrelay.config.section import Section
from kvrelay.loopback import is_loopback

_ADDRESS = re.compile(r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})$")
# Listeners of a router, by their keys in `listen`.
ENDPOINTS = ("grpc", "http", "admin")


def is_address(value: str, lowest_port: int = 0) -> bool:
    """Whether `value` is HOST:PORT with a port up to 65535."""
    match = _ADDRESS.match(value)
    return match is not None and lowest_port <= int(match[2]) <= 65535


def _address(value: str, *, lowest_port: int = 0) -> str:
    if not is_address(value, lowest_port):
        allowed = f"allowed are ports from {lowest_port} to 65535"
        raise ValueError(f"{value!r} is not HOST:PORT; {allowed}")
    return value


Address = Annotated[str, AfterValidator(_address)]
# Of a process to connect to.
PeerAddress = Annotated[str, AfterValidator(partial(_address, lowest_port=1))]


class ListenConfig(Section):
    """Addresses of the listeners. Router addresses are HOST:PORT."""

    grpc: Address = "127.0.0.1:50051"
    http: Address = "127.0.0.1:8000"
    admin: Address = "127.0.0.1:50052"
    # The host that workers bind and announce. auto: the address of the worker's Ray node. Use a
    # private network only.
    worker_host: str = "127.0.0.1"

    @property
    def workers_on_loopback(self) -> bool:
        """Whether workers listen on a loopback address."""
        return is_loopback(f"{self.worker_host}:0")
