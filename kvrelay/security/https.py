"""TLS for the HTTP listener."""

from __future__ import annotations

import ssl

from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials

log = get_logger("security")


def ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Returns the context of a server. Each handshake uses the current files; existing connections
    continue.
    """
    shown = credentials.current()
    latest = _context(credentials)

    def renew(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        nonlocal shown, latest
        current = credentials.current()
        if current is not shown:
            try:
                latest = _context(credentials)
            except OSError as error:
                # The files changed again. The next handshake checks them again.
                log.warning("certificate_rejected", reason=str(error))
                return
            shown = current
        connection.context = latest

    first = _context(credentials)
    # Runs in each handshake, whether or not the client sends a server name.
    first.sni_callback = renew
    return first


def _context(credentials: Credentials) -> ssl.SSLContext:
    """Loads the files. Raises OSError, the base class of ssl.SSLError."""
    files = credentials.files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
