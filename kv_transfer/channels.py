"""gRPC connections for KV: one for each decode worker's address, kept and reused."""

from __future__ import annotations

import asyncio

import grpc

from kv_transfer.transports.grpc import FRAME_BYTES
from kvrelay.errors import Unavailable
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.types.kv_layout import KvLayout

_PING_MS = 2_000
# Peers whose connections are kept. The connections to former peers of an elastic cluster are among
# them.
_MAX_OPEN = 256
# Calls on the connection of a peer that was not called for the longest time end within this time.
# In seconds.
GRACE_S = 60.0
# Room for a frame's numbers of its blocks, in bytes.
_NUMBERS_BYTES = 256 * 2**10


def message_bytes(layout: KvLayout) -> int:
    """Size of the largest frame in bytes. The receiver's server must accept this much."""
    return max(FRAME_BYTES, layout.block_bytes) + _NUMBERS_BYTES


class Channels:
    """A peer that is silent for some seconds, or gone, fails its calls with UNAVAILABLE.

    When this worker's certificate is replaced, the next call to each peer opens a new connection.
    Calls on the old connection continue.
    """

    def __init__(self, layout: KvLayout, credentials: Credentials | None = None) -> None:
        self._options = [
            ("grpc.max_send_message_length", message_bytes(layout)),
            # A store returns blocks.
            ("grpc.max_receive_message_length", message_bytes(layout)),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", 2 * _PING_MS),
            # Timeout of the pings that measure bandwidth.
            ("grpc.http2.ping_timeout_ms", 2 * _PING_MS),
            ("grpc.http2.max_pings_without_data", 0),
            # A new channel makes a new connection.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._credentials = credentials
        self._shown = None if credentials is None else credentials.current()
        self._open: dict[str, grpc.aio.Channel] = {}
        self._outdated: list[grpc.aio.Channel] = []
        # Tasks that close channels, once their calls have ended.
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._is_closed = False

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to the address, opened at the first call and after a change of the
        certificate. Raises Unavailable after `close`.
        """
        if self._is_closed:
            raise Unavailable("the connections of this worker are closed")
        if (
            self._credentials is not None
            and (current := self._credentials.current()) is not self._shown
        ):
            self._shown = current
            self._renew()
        channel = self._open.pop(address, None)
        if channel is None:
            channel = worker_channel(address, self._credentials, self._options)
        # The last entry is the last that was used.
        self._open[address] = channel
        while len(self._open) > _MAX_OPEN:
            oldest = next(iter(self._open))
            self._retire(self._open.pop(oldest), GRACE_S)
        return channel

    def retire(self, address: str, broken: grpc.aio.Channel, grace: float) -> None:
        """Removes the channel: the next call to the address opens a new connection. Calls on this
        one have `grace` seconds to end.
        """
        if address in self._open and self._open[address] is broken:
            del self._open[address]
            self._retire(broken, grace)

    def _renew(self) -> None:
        """Closes the channels of the certificate before the last one, whose calls have ended unless
        the certificate changes quickly.
        """
        for channel in self._outdated:
            self._retire(channel, GRACE_S)
        self._outdated = list(self._open.values())
        self._open.clear()

    def _retire(self, channel: grpc.aio.Channel, grace: float) -> None:
        task = asyncio.create_task(channel.close(grace))
        self._retired[task] = channel
        task.add_done_callback(self._retired.pop)

    async def close(self) -> None:
        """Closes all channels. Their calls fail, and so does `get`."""
        self._is_closed = True
        channels = [*self._outdated, *self._open.values(), *self._retired.values()]
        self._open.clear()
        for task in self._retired:
            # It waits for the grace of its channel.
            task.cancel()
        await asyncio.gather(*(channel.close(0) for channel in channels))
