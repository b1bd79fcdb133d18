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


class PrefixExport:
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

    async def _lend(self, request: FetchRequest) -> int:
        ours().check(request.protocol, request.target.worker_id)
        check_capability(self.key, self._grant(request), request.capability)
        size = self._cache.block_size
        first, rest = divmod(request.target.cached_tokens, size)
        tokens = len(request.token_ids)
        if rest or tokens > MAX_BLOCKS * size:
            raise FailedPrecondition(
                f"a fetch of {tokens} tokens, of which the first {request.target.cached_tokens} "
                f"are there, is not of my blocks, which have {size} tokens, or of more than "
                f"{MAX_BLOCKS}"
            )
        if tokens > request.granted_tokens:
            raise PermissionDenied(
                f"a fetch of {tokens} tokens goes beyond the {request.granted_tokens} granted"
            )
        blocks = self._cache.find(request.token_ids, request.salt)
        try:
            if len(blocks) <= first:
                raise NotFound(
                    f"the prefix cache holds {len(blocks) * size} of these {tokens} tokens"
                )
            push = self._sender.open((request.request_id, request.attempt), request.target)
            try:
                push.send(first, blocks[first:])
                await push.commit(0, len(blocks) * size, self._sender.clock.now())
            finally:
                await push.abort()  # returns at once where it is over
        finally:
            self._cache.release(blocks)
        self.lent += len(blocks) - first
        return len(blocks) - first

    def _grant(self, request: FetchRequest) -> FetchGrant:
        return FetchGrant(
            request.request_id,
            request.attempt,
            borrower=request.target.worker_id,
            address=request.target.address,
            lender=self._sender.worker_id,
            epoch=self._epoch,
            tokens=request.granted_tokens,
        )
