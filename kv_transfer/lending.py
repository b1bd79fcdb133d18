"""Gives other workers what a prefix cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from kv_transfer.sender import Sender
from kvrelay.errors import FailedPrecondition, KvRelayError, NotFound, PermissionDenied
from kvrelay.security.capability import FetchGrant, check_capability, make_key
from kvrelay.wire.status import abort
from kvrelay.wire.transfer import FetchRequest, fetch_request_from_proto, pb

MAX_NAMES = 2**16


class PrefixCache(Protocol):
    """Blocks by the hash of all tokens up to their end."""

    block_size: int

    def match(self, hashes: Sequence[int], limit_tokens: int) -> list[int]: ...

    def release(self, blocks: Sequence[int]) -> None: ...


class Lending:
    """KvTransferService.Fetch: pushes blocks that are found, from the first on, to the lease of who asks.

    Only for a request, a worker, an address and a length that a router has granted by means of the key. Lives on the
    event loop that owns the cache. The blocks are held until neither side reads them.
    """

    def __init__(self, cache: PrefixCache, sender: Sender, epoch: int) -> None:
        self._cache = cache
        self._sender = sender
        self._epoch = epoch
        self.key = make_key()  # for routers, who say by it which worker may fetch what
        self.lent = 0  # blocks, since the start

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> pb.FetchResponse:
        try:
            return pb.FetchResponse(blocks=await self._lend(fetch_request_from_proto(request)))
        except KvRelayError as error:
            await abort(context, error)

    async def _lend(self, wish: FetchRequest) -> int:
        check_capability(self.key, self._grant(wish), wish.capability)
        size = self._cache.block_size
        first, rest = divmod(wish.target.cached_tokens, size)
        if rest or len(wish.names) > MAX_NAMES:
            raise FailedPrecondition(
                f"a fetch of {len(wish.names)} blocks after {wish.target.cached_tokens} tokens is not of my blocks, "
                f"which have {size} tokens, or of more than {MAX_NAMES}"
            )
        if wish.target.cached_tokens + len(wish.names) * size > wish.granted_tokens:
            raise PermissionDenied(
                f"a fetch of {len(wish.names)} blocks goes beyond the {wish.granted_tokens} tokens granted"
            )
        blocks = self._cache.match(wish.names, len(wish.names) * size)
        try:
            if not blocks:
                raise NotFound("the prefix cache holds no block of these names any more")
            push = self._sender.open((wish.request_id, wish.attempt), wish.target)
            try:
                push.send(first, blocks)
                await push.commit(0, (first + len(blocks)) * size, self._sender.clock.now())
            finally:
                await push.abort()  # returns at once where it is over
        finally:
            self._cache.release(blocks)
        self.lent += len(blocks)
        return len(blocks)

    def _grant(self, wish: FetchRequest) -> FetchGrant:
        return FetchGrant(
            wish.request_id,
            wish.attempt,
            borrower=wish.target.worker_id,
            address=wish.target.address,
            lender=self._sender.worker_id,
            epoch=self._epoch,
            tokens=wish.granted_tokens,
        )
