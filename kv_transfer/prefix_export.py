"""Gives other workers what a prefix cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from kv_transfer.sender import Sender
from kvrelay.errors import FailedPrecondition, KvRelayError, NotFound, PermissionDenied
from kvrelay.protocol import ours
from kvrelay.security.capability import FetchGrant, check_capability, make_key
from kvrelay.wire.status import abort
from kvrelay.wire.transfer import FetchRequest, fetch_request_from_proto, pb

MAX_BLOCKS = 2**16


class PrefixCache(Protocol):
    """Blocks by the tokens up to their end and the salt of their sequence, all compared."""

    block_size: int

    def find(self, token_ids: Sequence[int], salt: str) -> list[int]: ...

    def release(self, blocks: Sequence[int]) -> None: ...


class Lending:
    """KvTransferService.Fetch: pushes blocks to the lease of the asking worker.

    Their KV is of the tokens and the salt that the worker shows. It is given them only for a
    request, a worker, an address and a length that a router has granted by means of the key. Lives
    on the event loop that owns the cache. The blocks are held until neither side reads them.
    """

    def __init__(self, cache: PrefixCache, sender: Sender, epoch: int) -> None:
        self._cache = cache
        self._sender = sender
        self._epoch = epoch
        self.key = make_key()  # for routers, who say by it which worker may fetch what
        self.lent = 0  # blocks, since the start

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> pb.FetchResponse:
        try:
            return pb.FetchResponse(blocks=await self._lend(fetch_request_from_proto(request)))
        except KvRelayError as error:
            await abort(context, error)

    async def _lend(self, wish: FetchRequest) -> int:
        ours().check(wish.protocol, wish.target.worker_id)
        check_capability(self.key, self._grant(wish), wish.capability)
        size = self._cache.block_size
        first, rest = divmod(wish.target.cached_tokens, size)
        tokens = len(wish.token_ids)
        if rest or tokens > MAX_BLOCKS * size:
            raise FailedPrecondition(
                f"a fetch of {tokens} tokens, of which the first {wish.target.cached_tokens} are "
                f"there, is not of my "
                f"blocks, which have {size} tokens, or of more than {MAX_BLOCKS}"
            )
        if tokens > wish.granted_tokens:
            raise PermissionDenied(
                f"a fetch of {tokens} tokens goes beyond the {wish.granted_tokens} granted"
            )
        blocks = self._cache.find(wish.token_ids, wish.salt)
        try:
            if len(blocks) <= first:
                raise NotFound(
                    f"the prefix cache holds {len(blocks) * size} of these {tokens} tokens"
                )
            push = self._sender.open((wish.request_id, wish.attempt), wish.target)
            try:
                push.send(first, blocks[first:])
                await push.commit(0, len(blocks) * size, self._sender.clock.now())
            finally:
                await push.abort()  # returns at once where it is over
        finally:
            self._cache.release(blocks)
        self.lent += len(blocks) - first
        return len(blocks) - first

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
