"""The addresses of a router, as its ready line tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvrelay.config.listen import ListenConfig
from kvrelay.errors import KvRelayError

_READY = re.compile(r"^kvrelay ready grpc=(\S+) http=(\S+) admin=(\S+)$")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a router: HOST:PORT of gRPC and admin, URL of HTTP."""

    grpc: str
    http: str
    admin: str

    def __str__(self) -> str:
        return f"kvrelay ready grpc={self.grpc} http={self.http} admin={self.admin}"

    def fixed_in(self, listen: ListenConfig) -> ListenConfig:
        """Returns `listen` with the router's addresses, also where it let the kernel choose a
        port.
        """
        addresses = {"grpc": self.grpc, "http": self.http.partition("://")[2], "admin": self.admin}
        return listen.model_copy(update=addresses)

    @classmethod
    def parse(cls, line: str) -> Endpoints:
        """Reads a router's ready line. Raises KvRelayError for any other line."""
        match = _READY.match(line)
        if match is None:
            raise KvRelayError(f"the router printed {line!r} instead of its addresses")
        return cls(*match.groups())
