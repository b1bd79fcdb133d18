"""Every error that a user or a peer can cause, and the one table that maps it to gRPC and HTTP.

KvRelayError
├── InvalidArgument       a bad field; `field` names it
├── FailedPrecondition    the request conflicts with one in flight
├── NotFound              unknown model, worker
├── Unauthenticated
├── PermissionDenied
├── ResourceExhausted     full; `retry_after_s` says when to come back
├── Unavailable           draining, no worker; `retry_after_s` likewise
├── DeadlineExceeded
├── Cancelled
├── DataLoss              KV that arrived is not the KV that was sent
├── Unimplemented
├── Internal
├── ConfigError           a configuration file or option; carries file and line
└── ModelRefused          a model folder that cannot be served; carries the reason
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """gRPC status names; the value is (gRPC number, HTTP status, OpenAI error type)."""

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
        return self.value[0]

    @property
    def http_status(self) -> int:
        return self.value[1]

    @property
    def openai_type(self) -> str:
        return self.value[2]


class KvRelayError(Exception):
    """Base of all errors; `code` is what a peer sees."""

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
    code = Code.INVALID_ARGUMENT


class FailedPrecondition(KvRelayError):
    code = Code.FAILED_PRECONDITION


class NotFound(KvRelayError):
    code = Code.NOT_FOUND


class Unauthenticated(KvRelayError):
    code = Code.UNAUTHENTICATED


class PermissionDenied(KvRelayError):
    code = Code.PERMISSION_DENIED


class ResourceExhausted(KvRelayError):
    code = Code.RESOURCE_EXHAUSTED


class Unavailable(KvRelayError):
    code = Code.UNAVAILABLE


class DeadlineExceeded(KvRelayError):
    code = Code.DEADLINE_EXCEEDED


class Cancelled(KvRelayError):
    code = Code.CANCELLED


class DataLoss(KvRelayError):
    code = Code.DATA_LOSS


class Unimplemented(KvRelayError):
    code = Code.UNIMPLEMENTED


class Internal(KvRelayError):
    code = Code.INTERNAL


class ConfigError(InvalidArgument):
    """The message begins with FILE:LINE where there is one."""


class ModelRefused(InvalidArgument):
    """The model folder is unsafe, broken, or of an architecture that would run wrong."""


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
    """The typed error for a status that came over a wire."""
    return _BY_CODE[code](message, field=field, retry_after_s=retry_after_s)
