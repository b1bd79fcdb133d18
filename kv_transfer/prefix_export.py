"""Prefix export: sends blocks of this worker's prefix cache to other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from kv_transfer.sender import Sender
from kvrelay.errors import FailedPrecondition, KvRelayError, NotFound, PermissionDenied
from kvrelay.protocol_version import ours
from kvrelay.security.capability import FetchGrant, check_capability, make_key
from kvrelay.wire.status import abort
from kvrelay.wire.transfer import FetchRequest, fetch_request_from_proto, pb

MAX_BLOCKS = 2**16


class PrefixCache(Protocol):
    """Blocks by the tokens up to their end, and the salt and the adapter of their sequence. The
    cache compares all of them.
    """

    block_size: int

    @property
    def shares(self) -> bool:
        """Whether other workers may have the blocks."""
        ...

    def find(self, token_ids: Sequence[int], salt: str, adapter: str) -> list[int]:
        """The longest cached prefix of these tokens, with a hold on each block."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one hold from each block."""
        ...


class PrefixExport:
    """KvTransferService.Fetch: pushes blocks to the lease of the requesting worker.

    The requesting worker must present the tokens, the salt and the adapter of the KV. It must also
    present a fetch grant, signed by a router with the grant key, for the request, the worker, the
    address and the length. Lives on the event loop that owns the cache. The blocks are held until
    neither side reads them.
    """

    def __init__(
        self,
        cache: PrefixCache,
        sender: Sender,
        epoch: int,
        on_release: Callable[[], None],
    ) -> None:
        """`on_release` is called when exported blocks are no longer held."""
        self._cache = cache
        self._on_release = on_release
        self._sender = sender
        self._epoch = epoch
        # The grant key, for routers that grant fetches.
        self.key = make_key()
        # Blocks exported since the start.
        self.exported = 0

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> pb.FetchResponse:
        """Pushes the cached blocks and returns their number. Aborts the call with the error's
        status.
        """
        try:
            return pb.FetchResponse(blocks=await self._export(fetch_request_from_proto(request)))
        except KvRelayError as error:
            await abort(context, error)

    async def _export(self, request: FetchRequest) -> int:
        ours().check(request.protocol, request.target.worker_id)
        check_capability(self.key, self._grant(request), request.capability)
        self._check_tokens(request)
        if not self._cache.shares:
            raise NotFound("blocks with sliding windows are not given to other workers")
        first = request.target.cached_tokens // self._cache.block_size
        blocks = self._cache.find(request.token_ids, request.salt, request.adapter)
        try:
            if len(blocks) <= first:
                held, tokens = len(blocks) * self._cache.block_size, len(request.token_ids)
                raise NotFound(f"the prefix cache contains only {held} of the {tokens} tokens")
            await self._push(request, first, blocks)
        finally:
            self._cache.release(blocks)
            self._on_release()
        self.exported += len(blocks) - first
        return len(blocks) - first

    def _check_tokens(self, request: FetchRequest) -> None:
        """Raises FailedPrecondition for tokens that no blocks of this cache can have, and
        PermissionDenied for more tokens than the router granted.
        """
        size, cached = self._cache.block_size, request.target.cached_tokens
        tokens = len(request.token_ids)
        if cached % size:
            raise FailedPrecondition(
                f"{cached} cached tokens are no whole blocks of {size} tokens; both workers need "
                "the same block size"
            )
        if tokens > MAX_BLOCKS * size:
            raise FailedPrecondition(
                f"a fetch of {tokens} tokens exceeds {MAX_BLOCKS} blocks of {size} tokens"
            )
        if tokens > request.granted_tokens:
            raise PermissionDenied(
                f"the fetch of {tokens} tokens exceeds the {request.granted_tokens} granted tokens"
            )

    async def _push(self, request: FetchRequest, first: int, blocks: Sequence[int]) -> None:
        key = request.request_id, request.attempt
        push = self._sender.open(key, request.target, request.adapter)
        try:
            push.send(first, blocks[first:])
            num_tokens = len(blocks) * self._cache.block_size
            await push.commit(0, num_tokens, self._sender.clock.now())
        finally:
            # Returns at once if the push is over.
            await push.abort()

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
