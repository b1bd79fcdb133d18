"""Errors on gRPC: converts `kvrelay.errors` to and from status, details and trailing metadata."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable
from typing import NoReturn
from urllib.parse import quote

import grpc

from kvrelay.errors import Code, KvRelayError, error_for

FIELD_KEY = "kvrelay-field"
RETRY_KEY = "grpc-retry-pushback-ms"
_NO_CONNECTION = "cannot connect: "
# Characters, and bytes as gRPC encodes them: 3 for each byte that is not printable ASCII. All
# metadata of a response must stay below 8 KiB.
_MAX_DETAILS = 1000
_MAX_ENCODED = 6 * 1024

# What gRPC sends as it is.
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MILLISECONDS = re.compile(r"[0-9]{1,9}")
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


async def abort(context: grpc.aio.ServicerContext, error: KvRelayError) -> NoReturn:
    """Aborts the call with the status of the error. The field and the retry delay of the error go
    into the trailing metadata.

    gRPC keeps the frames of an abort in a reference cycle. Where a handler can return without an
    answer, `set_status` costs less.
    """
    await context.abort(*_status(error))
    raise AssertionError("abort returns never")


def set_status(context: grpc.aio.ServicerContext, error: KvRelayError) -> None:
    """Sets the status and trailing metadata that `abort` sends. They are sent when the handler of
    the call returns. Only for handlers that stream their answers.
    """
    code, details, metadata = _status(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(metadata)


def _status(error: KvRelayError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns the code, details and trailing metadata of an error."""
    # The frames of the traceback refer to the message of the call, in a cycle that only the garbage
    # collector would free.
    error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    metadata = []
    if error.field is not None:
        metadata.append((FIELD_KEY, error.field))
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    return _STATUS[error.code.grpc_number], _details(error.message), tuple(metadata)


def _details(message: str) -> str:
    """Returns the start of a message that fits into the metadata. gRPC could not send the half of a
    surrogate pair, and sends no status then.
    """
    text = message[:_MAX_DETAILS].encode(errors="replace").decode()
    while len(quote(text, safe=_PRINTABLE)) > _MAX_ENCODED:
        text = text[: len(text) * 3 // 4]
    return text


def error_from_rpc(error: grpc.RpcError, target: str = "") -> KvRelayError:
    """Returns the typed error of a failed call of grpc or grpc.aio. Either kvrelay or gRPC itself
    may have set the status.

    The message of the result begins with `target`, if given. A status that kvrelay does not use
    becomes Internal.
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
        retry_after_s=int(retry) / 1000 if _MILLISECONDS.fullmatch(retry) else None,
    )


def is_answer(error: KvRelayError) -> bool:
    """Whether the error of `error_from_rpc` came over a connection."""
    return _NO_CONNECTION not in error.message


def _text_items(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _readable(details: str) -> str:
    """Shortens gRPC's report of a failed connection to its useful part."""
    if details.startswith(
        ("failed to connect to all addresses", "connections to all backends failing")
    ):
        if "Tls handshake failed" in details:
            return (
                f"TLS handshake failed: "
                f"{details.rpartition('OPENSSL_internal:')[2].removesuffix(': OK')}"
            )
        return f"{_NO_CONNECTION}{details.rpartition(': ')[2]}"
    return details


def task_cancelled() -> bool:
    """Whether a CancelledError cancels this task. gRPC raises CancelledError too, when its call or
    its channel ends.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
