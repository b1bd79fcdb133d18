"""The shared core of the blocking and the asyncio client: everything but I/O."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import grpc
from grpc.experimental import ChannelOptions

from kvrelay.client.channels import Channels
from kvrelay.client.credentials import Tls, bearer, channel_credentials
from kvrelay.client.hints import with_hint
from kvrelay.client.retry import Retry, RetryPolicy
from kvrelay.error_value import shown
from kvrelay.errors import Cancelled, FailedPrecondition, InvalidArgument, KvRelayError, Unavailable
from kvrelay.loopback import is_loopback
from kvrelay.wire.status import error_from_rpc

_TARGET = re.compile(r"^(\[[0-9a-fA-F:.]+\]|[^:/\s\[\]]+):(\d{1,5})$")
# The deadline ends the attempts.
_PATIENT = RetryPolicy(max_attempts=2**31, max_backoff_s=0.5)
# One name may stand for several routers (a headless Service). By default, gRPC would use only the
# first of them.
_SERVICE_CONFIG: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
# gRPC's own waits between connection attempts. They are short, so that the client soon finds a
# router that is back.
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Clients of one program have connections of their own, which several processes can share.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # The caller reads a blocking call itself. By default, a thread reads for all calls of the
    # channel, and stops for good at a lock that Ctrl-C in one of them left taken.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)


def channel_options(target: str) -> tuple[tuple[str, int | str], ...]:
    """Returns gRPC's options for HOST:PORT. A proxy of the environment (http_proxy) cannot reach
    this machine's loopback, and is not used for it.
    """
    if is_loopback(target):
        return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0))
    return _CHANNEL_OPTIONS


def check_target(target: str, listener: str) -> None:
    """Raises InvalidArgument unless `target` is HOST:PORT. listener: grpc or admin."""
    match = _TARGET.match(target)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise InvalidArgument(
            f"{target!r:.200} is not a target; give HOST:PORT without http://, with a port from 1 "
            f"to 65535, such as the address behind `{listener}=` in the line `kvrelay ready`",
            field="target",
        )


class BaseClient:
    """A client of one cluster.

    - targets: HOST:PORT of one or more routers. When one router is unavailable, the client tries
      the next.
    - timeout: seconds for a call with all its retries, unless the call sets its own; math.inf for
      no limit.
    - token: sent as a bearer token. Without tls, anyone on the network path can read the token.
    - tls: True trusts the authorities that this machine trusts. A path names a PEM file with the
      certificates of the authorities to trust instead; bytes are the content of such a file. Use
      `grpc.ssl_channel_credentials(...)` for other settings, for example a client certificate.
      Without tls, nothing is encrypted.

    A client that has made a call cannot be used after a fork, because gRPC's connections cannot:
    calls in the child raise FailedPrecondition. Create a client in each process, or create none
    before the fork. Do not fork while a stream is open: gRPC does not support it, so the child may
    crash and the parent's stream may stall. Raises InvalidArgument for a target that is not
    HOST:PORT, a token that is not one word, or tls without a certificate.
    """

    # The module grpc or grpc.aio.
    _grpc: ClassVar[Any]
    # BlockingPause or AsyncPause.
    _pause_of: ClassVar[type[Any]]

    def __init__(
        self,
        targets: str | Sequence[str] = "127.0.0.1:50051",
        *,
        timeout: float = 600.0,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: Tls = False,
    ) -> None:
        given = (targets,) if isinstance(targets, str) else targets
        if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
            raise InvalidArgument(
                f"targets is {targets!r:.60}; give HOST:PORT as text, or several in a list",
                field="targets",
            )
        self.targets = tuple(given)
        if not self.targets:
            raise InvalidArgument(
                "targets is empty; give HOST:PORT of at least one router", field="targets"
            )
        for target in self.targets:
            check_target(target, "grpc")
        self._timeout = timeout
        self._policy = retry or RetryPolicy()
        self._metadata = bearer(token)
        self._credentials = channel_credentials(tls)
        # Two threads may make the first call at the same time.
        self._lock = threading.Lock()
        # Id of the process that opened the channels.
        self._pid = 0
        # One for each target.
        self._channels: list[Channels] = []
        # Calls that a blocking client has begun.
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False
        # Whether a router has answered.
        self._is_known = False
        # The waits before retries.
        self._pause = self._pause_of()

    def _channels_to(self, index: int) -> Channels:
        """Returns the channels to the target with that index. They connect on first use."""
        self._raise_if_closed()
        with self._lock:
            if not self._channels:
                self._pid = os.getpid()
                # Ctrl-C may end this block anywhere, and the next call begins it again.
                self._channels = [
                    Channels(partial(self._open_channel, target)) for target in self.targets
                ]
            channels = self._channels[index]
        self._raise_if_forked()
        return channels

    @contextmanager
    def _renewing_channels(self) -> Iterator[None]:
        """Lets the next call open new channels if the exception of a signal handler, as Ctrl-C,
        ends the block: it can leave a lock of a channel taken.
        """
        try:
            yield
        except (KvRelayError, grpc.RpcError):
            raise
        except BaseException as error:
            # What gRPC raises for a channel that another thread has just closed.
            if self._closed and isinstance(error, ValueError):
                raise Cancelled("the client is closed") from None
            self._channels = []
            raise

    def _open_channel(self, target: str) -> Any:
        options = channel_options(target)
        if self._credentials is None:
            return self._grpc.insecure_channel(target, options)
        return self._grpc.secure_channel(target, self._credentials, options)

    @property
    def _forked(self) -> bool:
        """Whether this process is a fork of the process that opened the channels."""
        return self._pid not in (0, os.getpid())

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Cancelled("the client is closed")

    def _raise_if_forked(self) -> None:
        if self._forked:
            raise FailedPrecondition(
                "the client was used before this process was forked; create a client after the fork"
            )

    def _typed(self, error: grpc.RpcError, index: int) -> KvRelayError:
        """Returns the typed error of a failed call to the target with that index. The caller has
        not cancelled the call. gRPC also reports CANCELLED for calls that a server had not yet
        accepted when it shut down; these become Unavailable. Raises Cancelled if the client is
        closed.
        """
        target = self.targets[index]
        typed = with_hint(
            error_from_rpc(error, target), target, "grpc", tls=self._credentials is not None
        )
        if isinstance(typed, Cancelled):
            self._raise_if_closed()
            return Unavailable(f"{target}: the server ended the call")
        return typed

    def __repr__(self) -> str:
        security = "" if self._credentials is None else ", TLS"
        return (
            f"<kvrelay.{type(self).__name__} of "
            f"{', '.join(self.targets)}{security}{', closed' * self._closed}>"
        )

    def _retry(self, timeout: float | None, *, patient: bool = False) -> Retry:
        seconds = self._timeout if timeout is None else timeout
        # An integer may be beyond a float.
        try:
            is_time = isinstance(seconds, Real) and not math.isnan(seconds)
        except OverflowError:
            is_time = False
        if not is_time:
            raise InvalidArgument(
                f"timeout is {shown(seconds)}; it must be a number of seconds", field="timeout"
            )
        return Retry(
            _PATIENT if patient else self._policy,
            len(self.targets),
            seconds,
            is_known=self._is_known,
        )
