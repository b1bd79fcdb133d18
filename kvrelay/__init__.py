"""Disaggregated prefill/decode serving of large language models.

`Client` and `AsyncClient` talk to a cluster. `generate` returns a `Stream` or an `AsyncStream`.
Iterate over the stream to get each `GenerateResponse`, or take the whole `Completion`, whose
`Ledger` says where the time went. Every error that the clients raise is a `KvRelayError`. The
subclasses have the names of gRPC's status codes: `Unavailable`, `DeadlineExceeded` and so on. The
package imports each name on first use, so `import kvrelay` itself is cheap.
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
    # Looked up first, because this module does not import gRPC.
    errors = import_module("kvrelay.errors")
    return getattr(errors if hasattr(errors, name) else import_module("kvrelay.client"), name)
