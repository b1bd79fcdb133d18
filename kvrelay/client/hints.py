"""Adds advice to the errors of failed connections. gRPC's own messages only say what its library
saw.
"""

from __future__ import annotations

from kvrelay.errors import Code, KvRelayError

NOTHING_LISTENS = (
    "nothing listens there; start a cluster with `kvrelay serve`, or give the address in its line "
    "`kvrelay ready`"
)
# (code, text in the message, advice). The first match applies.
_MORE_TIME = "give more time (--timeout SECONDS, or timeout=)"
_HINTS = (
    (
        Code.UNAVAILABLE,
        "Connection refused",
        NOTHING_LISTENS,
    ),
    (
        Code.UNAVAILABLE,
        "Failed parsing HTTP/2",
        "that port speaks HTTP/1.1; give the address behind `grpc=`, or `admin=` for operators' "
        "calls, in the line `kvrelay ready`",
    ),
    (
        Code.UNAVAILABLE,
        "Socket closed",
        "the server may want TLS: give its CA (--tls-ca FILE, or tls=)",
    ),
    (
        Code.UNAVAILABLE,
        "WRONG_VERSION_NUMBER",
        "the server speaks no TLS: leave out the CA (--tls-ca, or tls=)",
    ),
    (
        Code.UNAVAILABLE,
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not signed by the CA that was given, or is for another name "
        "(--tls-ca FILE, or tls=)",
    ),
    (Code.UNAVAILABLE, "lookup", "no host has that name; give HOST:PORT"),
    (
        Code.UNIMPLEMENTED,
        "Method not found",
        "that port has another service: answers come from `grpc=` and operators' calls go to "
        "`admin=` in the line `kvrelay ready`",
    ),
    (
        Code.DEADLINE_EXCEEDED,
        "Deadline Exceeded",
        _MORE_TIME,
    ),
    (
        Code.DEADLINE_EXCEEDED,
        "had already passed",
        _MORE_TIME,
    ),
    (
        Code.RESOURCE_EXHAUSTED,
        "Received message larger than max",
        "a request has at most 4 MiB; shorten the prompt",
    ),
    (
        Code.UNAUTHENTICATED,
        "needs a token",
        "give the file that holds yours (--token-file FILE, or token=)",
    ),
)


# What gRPC's library saw is of no use here: words in its message, and what replaces them.
_NOISE = (
    ("Failed parsing HTTP/2", "cannot connect"),
    ("lookup", "cannot connect"),
    ("Method not found", "the call is unknown there"),
    ("Received message larger than max", "the request is too large"),
    ("Deadline Exceeded", "no answer within the timeout"),
)


def with_hint(error: KvRelayError) -> KvRelayError:
    """Returns the same error. If there is advice for the error, its message now ends with it.

    The message begins with the address and a colon.
    """
    for code, words, hint in _HINTS:
        if error.code is code and words in error.message:
            host, port, _ = error.message.split(":", 2)
            short = (f"{host}:{port}: {said}" for noise, said in _NOISE if noise == words)
            error.message = f"{next(short, error.message)}. {hint[0].upper()}{hint[1:]}"
            error.args = (error.message,)
            break
    return error
