"""TLS for the HTTP listener."""

from __future__ import annotations

import ssl

from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials

log = get_logger("security")


def ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Of a server. Each handshake takes the files as they are then; connections that are there go
    on.
    """
    shown = credentials.current()
    latest = _context(credentials)

    def renew(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        nonlocal shown, latest
        current = credentials.current()
        if current is not shown:
            try:
                latest = _context(credentials)
            except OSError as error:  # the files changed again; the next handshake looks anew
                log.warning("certificate_rejected", reason=str(error))
                return
            shown = current
        connection.context = latest

    first = _context(credentials)
    first.sni_callback = renew  # runs in each handshake, whether the client names a server or not
    return first


def _context(credentials: Credentials) -> ssl.SSLContext:
    """Raises OSError, of which ssl.SSLError is one."""
    files = credentials.files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
