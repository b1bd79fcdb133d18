"""What one process shows its peers and whom it believes, as the files are now."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from typing import Literal

from kvrelay.config.schema import SecurityConfig, TlsConfig
from kvrelay.errors import ConfigError
from kvrelay.process.telemetry import get_logger
from kvrelay.security import expiry
from kvrelay.security.key_pair import Files, KeyPair, load

log = get_logger("security")


class Credentials:
    """Certificates are replaced by replacing their files: connections made from then on use the new
    ones, those that are there go on. Files that are broken, or half written, change nothing but the
    log.

    Any thread may ask: gRPC does so from its own, in each handshake.
    """

    def __init__(self, files: Files) -> None:
        """Raises ConfigError."""
        self.files = files
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._current = load(files, _now())
        self._refused = ""  # why the files, as last seen, were not taken
        self._told = ""

    @classmethod
    def internal(
        cls, security: SecurityConfig, role: Literal["router", "worker"]
    ) -> Credentials | None:
        """Of a router or controller, or of a worker, for connections within the cluster; None
        without TLS.

        Raises ConfigError.
        """
        tls = security.tls
        if tls is None:
            return None
        pair = tls.router if role == "router" else tls.worker
        sides: tuple[Literal["client", "server"], ...] = (
            ("client",) if role == "router" else ("client", "server")
        )
        return cls(Files(pair.cert, pair.key, tls.ca, role, sides, f"security.tls.{role}"))

    @classmethod
    def public(cls, security: SecurityConfig) -> Credentials | None:
        """Of the listeners for clients and operators; None without TLS. Raises ConfigError."""
        return None if security.tls is None else cls(_public_files(security.tls))

    def current(self) -> KeyPair:
        """The same object as long as nothing has changed."""
        with self._lock:
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                self._reload()
            return self._current

    def trouble(self, now: datetime | None = None) -> str:
        """What an operator should do something about, or nothing: the certificate ends soon, has
        ended, or its successor is not to be used. Says it in the log, too, when it is news.
        """
        pair = self.current()
        text = expiry.notice(self.files.cert, pair.ends, now or _now())
        text = "; ".join(part for part in (text, self._refused) if part)
        if text != self._told:
            self._told = text
            if text:
                log.warning("certificate_expiring", setting=self.files.where, reason=text)
            else:
                log.info(
                    "certificate_valid",
                    setting=self.files.where,
                    until=pair.ends.isoformat(),
                )
        return text

    def _reload(self) -> None:
        try:
            self._current = load(self.files, _now())
            self._refused = ""
            log.info(
                "certificate_loaded", file=self.files.cert, until=self._current.ends.isoformat()
            )
        except ConfigError as error:
            self._refused = f"not taken: {error.message}"
            log.warning("certificate_rejected", reason=error.message)

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes when one of the files does. A mounted Kubernetes secret is a link that comes to
        lead elsewhere.
        """
        paths = (self.files.cert, self.files.key, self.files.ca)
        return tuple(_stat(path) for path in paths if path is not None)


def _public_files(tls: TlsConfig) -> Files:
    if tls.public is None:
        return Files(
            tls.router.cert, tls.router.key, None, None, ("server",), "security.tls.router"
        )
    pair = tls.public
    where = "security.tls.public"
    return Files(
        pair.cert, pair.key, pair.client_ca, None, ("server",), where, f"{where}.client_ca"
    )


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _now() -> datetime:
    return datetime.now(UTC)
