"""Disaggregated prefill/decode serving of large language models.

`Client` and `AsyncClient` talk to a cluster. `generate` gives a `Stream` or `AsyncStream`: iterate
it for each `GenerateResponse`, or take the whole `Completion`, which says with its `Ledger` where
the time went. Every error that they raise is a `KvRelayError`: `Unavailable`, `DeadlineExceeded`
and so on, named like gRPC's status codes. Names are imported upon first use, so that `import
kvrelay` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.client import (
        AsyncClient,
        AsyncStream,
        Attempt,
        Client,
        Completion,
        GenerateOptions,
        GenerateResponse,
        Handoff,
        Ledger,
        ModelInfo,
        RetryPolicy,
        Stream,
        Token,
        TokenLogprobs,
        Usage,
    )
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
    "Attempt",
    "Cancelled",
    "Client",
    "Completion",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "GenerateOptions",
    "GenerateResponse",
    "Handoff",
    "Internal",
    "InvalidArgument",
    "KvRelayError",
    "Ledger",
    "ModelInfo",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "RetryPolicy",
    "Stream",
    "Token",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("kvrelay")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    errors = import_module("kvrelay.errors")  # first, since it needs no gRPC
    return getattr(errors if hasattr(errors, name) else import_module("kvrelay.client"), name)
