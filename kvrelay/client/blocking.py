"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kvrelay.client.answer import Completion
from kvrelay.client.base import CHANNEL_OPTIONS, BaseClient, BaseStream
from kvrelay.client.request import GenerateOptions
from kvrelay.client.retry import Retry
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.wire import inference as wire
from kvrelay.wire.status import error_from_rpc


class Client(BaseClient):
    __doc__ = BaseClient.__doc__

    _sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
