"""URLs of Redis: one server, or the Sentinels that know which server is the primary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

_SCHEME = re.compile(r"^redis(s?)\+sentinel://")
_DEFAULT_PORT = 26379
# The begin of all keys of a cluster in Redis.
DEFAULT_NAMESPACE = "kvrelay"
# In the namespace of one of several models: between the cluster's namespace and the model.
MODEL_MARK = "@"


@dataclass(frozen=True, slots=True)
class Sentinels:
    """redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[?db=N]

    User and password are those of Redis. With rediss+sentinel://, the connections to Redis and to
    the Sentinels use TLS.
    """

    addresses: tuple[tuple[str, int], ...]
    # The name under which the Sentinels monitor the primary.
    service: str
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Sentinels | None:
        """Parses a Sentinel URL. Returns None for the URL of a single server. Raises ValueError
        with the reason.
        """
        scheme = _SCHEME.match(url)
        if scheme is None:
            return None
        # Current versions of urlsplit take a list of hosts with an IPv6 address for a mistake.
        authority, _, rest = url[scheme.end() :].partition("#")[0].partition("/")
        path, _, parameters = rest.partition("?")
        credentials, _, hosts = authority.rpartition("@")
        username, _, password = credentials.partition(":")
        service = unquote(path.lstrip("/"))
        if not service or "/" in service:
            raise ValueError(
                "the path of a Sentinel URL must be the service name: "
                "redis+sentinel://HOST:PORT/SERVICE"
            )
        query = parse_qs(parameters)
        db = query.pop("db", ["0"])[-1]
        if query or not db.isdecimal():
            raise ValueError(
                f"the query {parameters[:64]!r} is not allowed; the only parameter is db=NUMBER"
            )
        return cls(
            tuple(_address(one) for one in hosts.split(",")),
            service,
            int(db),
            unquote(username) or None,
            unquote(password) or None,
            bool(scheme[1]),
        )


def hosts_of(url: str) -> tuple[str, ...]:
    """Returns the names or addresses of all hosts in the URL. Raises ValueError."""
    sentinels = Sentinels.parse(url)
    if sentinels is not None:
        return tuple(host for host, _ in sentinels.addresses)
    return (urlsplit(url).hostname or "localhost",)


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or "@" in text:
        raise ValueError(f"{text[:64]!r} is not the address of a Sentinel; give HOST or HOST:PORT")
    return parts.hostname, parts.port or _DEFAULT_PORT


def without_password(url: str) -> str:
    """Returns the URL with *** in place of its password, also of one in the query."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    user, colon, _ = credentials.partition(":")
    shown = f"{user}{colon}***" if colon else credentials
    path = re.sub(r"(?<=password=)[^&]*", "***", path)
    return f"{scheme}{separator}{shown}{at}{hosts}{slash}{path}"
