"""Errors on gRPC: `kvrelay.errors` to status, details and trailing metadata, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

import grpc

from kvrelay.errors import Code, KvRelayError, error_for

FIELD_KEY = "kvrelay-field"
RETRY_KEY = "grpc-retry-pushback-ms"
_MAX_DETAILS = 1000  # characters; all of a response's metadata must stay below 8 KiB

_STATUS = {status.value[0]: status for status in grpc.StatusCode}


async def abort(context: grpc.aio.ServicerContext, error: KvRelayError) -> NoReturn:
    """Ends the call with the error's status; what the error knows besides goes into trailing
    metadata.
    """
    # Its frames hold the call's message, in a cycle that only the garbage collector would break.
    error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    metadata = []
    if error.field is not None:
        metadata.append((FIELD_KEY, error.field))
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    await context.abort(
        _STATUS[error.code.grpc_number], error.message[:_MAX_DETAILS], tuple(metadata)
    )
    raise AssertionError("abort returns never")


def error_from_rpc(error: grpc.RpcError, target: str = "") -> KvRelayError:
    """The typed error of a failed call, of grpc or grpc.aio, whether kvrelay or gRPC itself set the
    status.

    A message of gRPC's own names the target. A status that kvrelay does not use becomes Internal.
    """
    status: grpc.StatusCode = error.code()
    details: str = error.details() or status.name
    trailing = _text_items(error.trailing_metadata())
    code = Code[status.name] if status.name in Code.__members__ else Code.INTERNAL
    retry = trailing.get(RETRY_KEY, "")
    return error_for(
        code,
        f"{target}: {_readable(details)}" if target else _readable(details),
        field=trailing.get(FIELD_KEY),
        retry_after_s=int(retry) / 1000 if retry.isdecimal() else None,
    )


def _text_items(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _readable(details: str) -> str:
    """gRPC's report of a failed connection, cut to what a reader can use."""
    if details.startswith(
        ("failed to connect to all addresses", "connections to all backends failing")
    ):
        if "Tls handshake failed" in details:
            return (
                f"TLS handshake failed: "
                f"{details.rpartition('OPENSSL_internal:')[2].removesuffix(': OK')}"
            )
        return f"cannot connect: {details.rpartition(': ')[2]}"
    return details
