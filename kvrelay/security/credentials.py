"""The certificates and keys of one process, reloaded when their files change."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from typing import Literal

from kvrelay.config.security import SecurityConfig, TlsConfig
from kvrelay.errors import ConfigError
from kvrelay.process.telemetry import get_logger
from kvrelay.security import expiry
from kvrelay.security.key_pair import Files, KeyPair, load

log = get_logger("security")


class Credentials:
    """A certificate is replaced by replacing its files. New connections use the new files; existing
    connections continue. Broken or partly written files are logged and otherwise ignored.

    Thread-safe: gRPC calls this from its own threads, in each handshake.
    """

    def __init__(self, files: Files) -> None:
        """Loads the files. Raises ConfigError."""
        self.files = files
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._current = load(files, _now())
        # Why the current files were rejected; empty if they were accepted.
        self._refused = ""
        self._told = ""

    @classmethod
    def internal(
        cls, security: SecurityConfig, role: Literal["router", "worker"]
    ) -> Credentials | None:
        """Returns the credentials for connections inside the cluster, of a router or controller, or
        of a worker. Returns None without TLS.

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
        """Returns the credentials of the listeners for clients and operators; None without TLS.
        Raises ConfigError.
        """
        return None if security.tls is None else cls(_public_files(security.tls))

    def current(self) -> KeyPair:
        """Returns the current key pair. The object stays the same until the files change."""
        with self._lock:
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                self._reload()
            return self._current

    def trouble(self, now: datetime | None = None) -> str:
        """Returns what an operator should fix: the certificate expires soon, has expired, or its
        replacement cannot be used. Returns an empty string if there is nothing. Logs each change of
        the first two; `_reload` logs the third.
        """
        pair = self.current()
        notice = expiry.notice(self.files.cert, pair.ends, now or _now())
        if notice != self._told:
            self._told = notice
            if notice:
                log.warning("certificate_expiring", setting=self.files.where, reason=notice)
            else:
                log.info(
                    "certificate_valid",
                    setting=self.files.where,
                    until=pair.ends.isoformat(),
                )
        return "; ".join(part for part in (notice, self._refused) if part)

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
        """Returns a value that changes when one of the files changes. It follows links, because a
        mounted Kubernetes secret is a link whose target changes.
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
