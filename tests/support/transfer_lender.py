"""A worker that lends blocks of its prefix cache, and one that asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from support.few_hashes import CollidingCache, Cut
from support.transfer_ends import KEY, LAYOUT, SENDER, DecodeEnd, MemoryFile, decode_end, sender_of

from kv_transfer.prefix_export import PrefixExport
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.security.capability import FetchGrant, make_capability
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import FetchRequest, add_kv_transfer_servicer, kv_fetch

BLOCKS = [9, 3, 4, 20]  # of the one that asks
TOKENS = tuple(range(4 * LAYOUT.block_size))
SALT = "secret"


@dataclass
class Lent:
    """It holds the KV of TOKENS, of a tenant with that salt."""

    prefix_export: PrefixExport
    cache: KvCache
    asking: DecodeEnd
    address: str

    @property
    def right(self) -> FetchRequest:
        target = self.asking.grant(BLOCKS, partial=True)
        tokens = len(TOKENS)
        grant = FetchGrant(*KEY, target.worker_id, target.address, SENDER, epoch=3, tokens=tokens)
        return FetchRequest(
            *KEY, TOKENS, target, tokens, make_capability(self.prefix_export.key, grant), SALT
        )

    async def ask(self, wish: FetchRequest, channel: grpc.aio.Channel | None = None) -> int:
        """Over that channel, or one of its own. Raises the lender's error."""
        try:
            if channel is not None:
                return await kv_fetch(channel, wish, 20.0)
            async with grpc.aio.insecure_channel(self.address) as own:
                return await kv_fetch(own, wish, 20.0)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


@asynccontextmanager
async def lender(cut: Cut | None = None) -> AsyncIterator[Lent]:
    """Its prefix cache keeps what `cut` leaves of its hashes."""
    source = MemoryFile()
    size = LAYOUT.block_size
    cache = (
        KvCache(source.num_blocks, size)
        if cut is None
        else CollidingCache(source.num_blocks, size, cut)
    )
    prefix = cache.hasher(SALT)
    prefix.extend(TOKENS)
    blocks = cache.allocate(len(prefix.hashes))
    cache.publish(prefix, blocks, 0, len(blocks))
    cache.release(blocks)
    async with decode_end() as asking, sender_of(source) as sender:
        prefix_export = PrefixExport(cache, sender, 3, lambda: None)
        server = grpc.aio.server()
        add_kv_transfer_servicer(asking.receiver.Push, prefix_export.Fetch, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield Lent(prefix_export, cache, asking, f"127.0.0.1:{port}")
        finally:
            await server.stop(None)
