"""The gRPC channels to one target."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import grpc

from kvrelay.wire import inference as wire

# Calls in progress on one channel before another opens. A router takes 128 of one connection, and
# more would wait at the client.
CALLS = 100
MAX_CHANNELS = 64


class Channels:
    """Channels to one target, as many as its calls in progress need. They connect on first use. Any
    thread may use them.
    """

    def __init__(self, open_channel: Callable[[], Any]) -> None:
        """`open_channel` returns a channel of grpc or grpc.aio."""
        self._open_channel = open_channel
        self.opened: list[Any] = []
        self._stubs: list[wire.InferenceServiceStub] = []
        # Calls in progress of each channel.
        self._calls: list[int] = []
        # The garbage collector may end a call at any moment.
        self._lock = threading.RLock()

    def stub(self) -> wire.InferenceServiceStub:
        """Returns the stub of the channel with the fewest calls, for a short call."""
        return self._stubs[self._place()]

    def generate(self, request: wire.pb.GenerateRequest, **options: Any) -> Any:
        """Begins a call of Generate with gRPC's `options`, and returns it. Raises the ValueError of
        grpc or the UsageError of grpc.aio if the channel is closed.
        """
        with self._lock:
            place = self._place()
            self._calls[place] += 1
        try:
            call = self._stubs[place].Generate(request, **options)
        except BaseException:
            self._end(place)
            raise
        # A call that was cancelled may end without a callback.
        ended = weakref.finalize(call, self._end, place)
        ended.atexit = False
        if isinstance(call, grpc.aio.Call):
            call.add_done_callback(lambda _: ended())
        # A done callback of grpc would refer to the call, in a cycle.
        elif not call.add_callback(ended):
            ended()
        return call

    def _place(self) -> int:
        """Returns the place of the channel for the next call."""
        with self._lock:
            place = min(range(len(self._calls)), key=self._calls.__getitem__, default=None)
            if place is None or (self._calls[place] >= CALLS and len(self._calls) < MAX_CHANNELS):
                place = len(self._calls)
                channel = self._open_channel()
                self.opened.append(channel)
                self._stubs.append(wire.InferenceServiceStub(channel))
                # Last: Ctrl-C may end this block anywhere.
                self._calls.append(0)
            return place

    def _end(self, place: int) -> None:
        with self._lock:
            self._calls[place] -= 1
