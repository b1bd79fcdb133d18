"""What to do about a connection that failed, in words for people: gRPC says only what its library
saw.
"""

from __future__ import annotations

from kvrelay.errors import Code, KvRelayError

# (code, what the message has, what to do). The first that fits is taken.
_HINTS = (
    (
        Code.UNAVAILABLE,
        "Connection refused",
        "nothing listens there; start a cluster with `kvrelay serve`, or give the address in its "
        "line `kvrelay ready`",
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
        Code.UNAUTHENTICATED,
        "needs a token",
        "give the file that holds yours (--token-file FILE, or token=)",
    ),
)


def with_hint(error: KvRelayError) -> KvRelayError:
    """The same error; its message says what to do where that is known."""
    for code, words, hint in _HINTS:
        if error.code is code and words in error.message:
            error.message = f"{error.message}. {hint[0].upper()}{hint[1:]}"
            error.args = (error.message,)
            break
    return error
