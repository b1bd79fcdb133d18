"""Adds advice to the errors of failed connections. gRPC's own messages only say what its library
saw.
"""

from __future__ import annotations

from kvrelay.errors import Code, KvRelayError

ADDRESSES = {
    name: f"give the address behind `{name}=` in the line `kvrelay ready`"
    for name in ("grpc", "http", "admin")
}
"""What to do if a port is not the one that was meant, by the name of the right listener."""
NOTHING_LISTENS = (
    "nothing listens there; start a cluster with `kvrelay serve`, or give the address in its line "
    "`kvrelay ready`"
)
# A router's advice. It does not know how its client is given a deadline or a model.
_LATER = "send a later deadline"
_NAME_A_MODEL = "name one"
# What a server may want that closes a connection at once, by whether the client uses TLS.
_WANTED = {
    False: "the server may want TLS: give its CA (--tls-ca FILE, or tls=)",
    True: "the server may want a client certificate, of a CA that it trusts and still valid "
    "(--tls-cert and --tls-key, or tls=)",
}
# (code, text in the message, advice). The first match applies. {give} is one of ADDRESSES,
# {secured} one of _WANTED.
_MORE_TIME = "give more time (--timeout SECONDS, or timeout=)"
# By version of gRPC.
_NO_HOST = ("errors resolving ", "DNS resolution failed")
_HINTS = (
    (
        Code.UNAVAILABLE,
        "Connection refused",
        NOTHING_LISTENS,
    ),
    (
        Code.UNAVAILABLE,
        "Failed parsing HTTP/2",
        "that port speaks HTTP/1.1, not gRPC; {give}",
    ),
    (
        Code.UNAVAILABLE,
        "cannot connect: Socket closed",
        "{secured}; or it has no room for more connections",
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
    (
        Code.UNAVAILABLE,
        "Hostname Verification Check failed",
        "the server's certificate is for other names; connect by one of them, or make one for this "
        "name (`kvrelay certs FOLDER --host NAME`)",
    ),
    *((Code.UNAVAILABLE, words, "no host has that name; give HOST:PORT") for words in _NO_HOST),
    (
        Code.UNIMPLEMENTED,
        "Method not found",
        "that port has another service; {give}",
    ),
    (
        Code.DEADLINE_EXCEEDED,
        "Deadline Exceeded",
        f"no answer within the timeout; {_MORE_TIME}",
    ),
    (
        Code.DEADLINE_EXCEEDED,
        _LATER,
        _MORE_TIME,
    ),
    (
        Code.INVALID_ARGUMENT,
        _NAME_A_MODEL,
        "name one (--model NAME, or model=)",
    ),
    (
        Code.RESOURCE_EXHAUSTED,
        "Received message larger than max",
        "a request has at most 4 MiB; shorten the prompt",
    ),
)


# Words in messages of gRPC's library that are of no use here. The advice replaces them.
_NOISE = (
    "Failed parsing HTTP/2",
    *_NO_HOST,
    "Method not found",
    "Received message larger than max",
    "Deadline Exceeded",
)


def with_hint(
    error: KvRelayError, target: str, listener: str, *, tls: bool = False
) -> KvRelayError:
    """Returns the same error. If there is advice for the error, its message now ends with it.

    - target: HOST:PORT of the call.
    - listener: the one that the client calls, grpc or admin.
    - tls: whether the client uses TLS.
    """
    for code, words, hint in _HINTS:
        if error.code is code and words in error.message:
            told = hint.format(give=ADDRESSES[listener], secured=_WANTED[tls])
            if words in _NOISE:
                error.message = f"{target}: {told}"
            elif words in (_LATER, _NAME_A_MODEL):
                error.message = error.message.replace(words, told)
            else:
                error.message = f"{error.message}. {told[0].upper()}{told[1:]}"
            error.args = (error.message,)
            break
    return error
