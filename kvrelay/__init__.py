"""Disaggregated prefill/decode serving of large language models.

`Client` and `AsyncClient` talk to a cluster; every error that they raise is a `KvRelayError`.
Names are imported upon first use, so that `import kvrelay` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.client import AsyncClient, AsyncStream, Client, Completion, RetryPolicy, Stream
    from kvrelay.errors import (
        Cancelled,
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        Internal,
        InvalidArgument,
        KvRelayError,
        NotFound,
        PermissionDenied,
        ResourceExhausted,
        Unauthenticated,
        Unavailable,
        Unimplemented,
    )

    __version__: str

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "Completion",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "KvRelayError",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "RetryPolicy",
    "Stream",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "__version__",
]

_FROM_CLIENT = {"AsyncClient", "AsyncStream", "Client", "Completion", "RetryPolicy", "Stream"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("kvrelay")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kvrelay.client" if name in _FROM_CLIENT else "kvrelay.errors"), name)
