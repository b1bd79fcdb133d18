"""All errors that a user or a peer can cause, and the table that maps them to gRPC and HTTP.

KvRelayError
├── InvalidArgument       a bad field; `field` names it
├── FailedPrecondition    the request conflicts with a request in progress
├── NotFound              unknown model or worker
├── Unauthenticated
├── PermissionDenied
├── ResourceExhausted     full; `retry_after_s` says when to retry
├── Unavailable           draining, or no worker; `retry_after_s` says when to retry
├── DeadlineExceeded
├── Cancelled
├── DataLoss              the received KV differs from the sent KV
├── Unimplemented
├── Internal
├── ConfigError           a bad configuration file or option; carries file and line
└── ModelRefused          a model folder that cannot be served; carries the reason
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """gRPC status names. The value is (gRPC number, HTTP status, OpenAI error type)."""

    CANCELLED = (1, 499, "request_cancelled")
    INVALID_ARGUMENT = (3, 400, "invalid_request_error")
    DEADLINE_EXCEEDED = (4, 504, "timeout_error")
    NOT_FOUND = (5, 404, "not_found_error")
    PERMISSION_DENIED = (7, 403, "permission_error")
    RESOURCE_EXHAUSTED = (8, 429, "rate_limit_error")
    FAILED_PRECONDITION = (9, 409, "conflict_error")
    UNIMPLEMENTED = (12, 501, "not_implemented_error")
    INTERNAL = (13, 500, "internal_error")
    UNAVAILABLE = (14, 503, "service_unavailable_error")
    DATA_LOSS = (15, 500, "data_loss_error")
    UNAUTHENTICATED = (16, 401, "authentication_error")

    @property
    def grpc_number(self) -> int:
        """The number of the gRPC status."""
        return self.value[0]

    @property
    def http_status(self) -> int:
        """The HTTP status code."""
        return self.value[1]

    @property
    def openai_type(self) -> str:
        """The `type` in an error of the OpenAI API."""
        return self.value[2]


class KvRelayError(Exception):
    """Base class of all errors. Peers see `code`. `retry_after_s` is in seconds."""

    code = Code.INTERNAL

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.field, self.retry_after_s)


def _rebuild(
    kind: type[KvRelayError], message: str, field: str | None, retry_after_s: float | None
) -> KvRelayError:
    return kind(message, field=field, retry_after_s=retry_after_s)


class InvalidArgument(KvRelayError):
    """A value of the request is invalid; `field` names it. A retry cannot succeed."""

    code = Code.INVALID_ARGUMENT


class FailedPrecondition(KvRelayError):
    """The request conflicts with the current state, for example with a request in progress."""

    code = Code.FAILED_PRECONDITION


class NotFound(KvRelayError):
    """The model or worker does not exist."""

    code = Code.NOT_FOUND


class Unauthenticated(KvRelayError):
    """The call has no valid token or certificate."""

    code = Code.UNAUTHENTICATED


class PermissionDenied(KvRelayError):
    """The caller is known but lacks the permission for the call."""

    code = Code.PERMISSION_DENIED


class ResourceExhausted(KvRelayError):
    """A limit is reached; `retry_after_s` is set if a later retry may succeed."""

    code = Code.RESOURCE_EXHAUSTED


class Unavailable(KvRelayError):
    """The service cannot answer now: it is draining, unreachable, or has no worker. A retry may
    succeed.
    """

    code = Code.UNAVAILABLE


class DeadlineExceeded(KvRelayError):
    """The deadline passed before the answer was complete."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(KvRelayError):
    """The caller cancelled the request."""

    code = Code.CANCELLED


class DataLoss(KvRelayError):
    """Data is missing, or the received KV differs from the sent KV."""

    code = Code.DATA_LOSS


class Unimplemented(KvRelayError):
    """The peer does not implement the call."""

    code = Code.UNIMPLEMENTED


class Internal(KvRelayError):
    """A bug in kvrelay, or an unexpected answer of a peer."""

    code = Code.INTERNAL


class ConfigError(InvalidArgument):
    """A configuration file or option is invalid. The message begins with FILE:LINE if there is a
    file.
    """


class ModelRefused(InvalidArgument):
    """The model folder is unsafe, broken, or of an architecture that would give wrong results."""


_BY_CODE: dict[Code, type[KvRelayError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        FailedPrecondition,
        NotFound,
        Unauthenticated,
        PermissionDenied,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        DataLoss,
        Unimplemented,
        Internal,
    )
}


def error_for(
    code: Code, message: str, *, field: str | None = None, retry_after_s: float | None = None
) -> KvRelayError:
    """Returns the typed error for a status that was received from a peer."""
    return _BY_CODE[code](message, field=field, retry_after_s=retry_after_s)
