"""Fetches the KV of a prompt's prefix from another worker's prefix cache into this worker's."""

from __future__ import annotations

import grpc

from kv_transfer.lease import Lease
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.errors import FailedPrecondition, KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.process.uninterrupted import to_its_end
from kvrelay.types.requests import SequenceSpec
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import FetchRequest, kv_fetch
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.inbound_kv import InboundKv
from kvrelay.worker.sequence import Sequence
from kvrelay.worker_messages import PrefixSource
from prefill_worker.fetch_cost_model import FetchCostModel

log = get_logger(__name__)

# Longest time, in seconds, that a prompt waits for another worker.
_LONGEST_S = 5.0
_SHORTEST_S = 0.25


class Fetcher:
    """Asks the worker that holds the prefix to push it into leased blocks of this worker. Lives on
    the worker's event loop.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        # Lease id -> tokens whose KV is now in the lease's blocks.
        self._arrived: dict[int, int] = {}
        self.cost_model = FetchCostModel()
        self.inbound = InboundKv(context, self._commit)

    async def fetch(self, sequence: Sequence, source: PrefixSource, transport: str) -> None:
        """Fetches a prefix if the cost model predicts that this is faster than computing it.

        Afterwards the sequence holds all its blocks, with more KV than this worker's cache had, and
        may start. If the fetch failed or did not pay, or the call is cancelled, the sequence holds
        no blocks.
        """
        cache, began = self._context.cache, self._context.clock.now()
        sequence.take_prefix(cache)
        end = min(source.cached_tokens, len(sequence.tokens) - 1)
        end -= end % cache.block_size
        missing = max(0, end - sequence.num_computed)
        try:
            if self.cost_model.is_fetch_faster(missing, self._num_bytes(missing)):
                sequence.take_blocks(cache, len(sequence.tokens))
                sequence.fetched_tokens = await self._ask(sequence, source, transport, end)
        except OutOfBlocks:
            # The sequence waits for blocks like all others.
            pass
        # A fetch only saves time. After any failure this worker computes the prefix.
        except Exception:
            log.exception(
                "prefix_fetch_failed", request=sequence.spec.request_id, worker=source.worker_id
            )
        finally:
            if not sequence.fetched_tokens:
                sequence.drop_blocks(cache)
        if sequence.fetched_tokens:
            self._start(sequence, began)

    def _start(self, sequence: Sequence, began: float) -> None:
        """Adds the fetched KV to the sequence and to the cache."""
        now = self._context.clock.now()
        sequence.advance(self._context.cache, sequence.fetched_tokens)
        sequence.cached_tokens = sequence.num_computed
        sequence.started, sequence.fetch_seconds = now, now - began
        self.cost_model.add_fetch(self._num_bytes(sequence.fetched_tokens), now - began)

    async def _ask(self, sequence: Sequence, source: PrefixSource, transport: str, end: int) -> int:
        """Number of tokens that arrived."""
        context, spec = self._context, sequence.spec
        own, size, now = sequence.num_computed, context.cache.block_size, context.clock.now()
        timeout_s = min(self._timeout_s(end - own), max(0.0, sequence.deadline - now))
        blocks = sequence.blocks[: end // size]
        lease = self.inbound.leases.grant(
            spec.key,
            blocks,
            own // size,
            2 * timeout_s,
            now,
            partial=True,
            adapter=spec.adapter,
        )
        request = FetchRequest(
            *spec.key,
            tuple(sequence.tokens[:end]),
            self.inbound.target(lease, own, source.worker_id, transport),
            source.cached_tokens,
            source.capability,
            spec.salt,
            spec.adapter,
        )
        try:
            await kv_fetch(context.sender.channels.get(source.address), request, timeout_s)
        except grpc.aio.AioRpcError as error:
            self._tell(spec, source, error_from_rpc(error, source.address))
        except FailedPrecondition as error:
            self._tell(spec, source, error)
        finally:
            arrived = await to_its_end(self._end(lease, own))
        return max(0, arrived - own)

    def _tell(self, spec: SequenceSpec, source: PrefixSource, error: KvRelayError) -> None:
        log.info(
            "prefix_fetch_failed",
            request=spec.request_id,
            worker=source.worker_id,
            reason=error.message,
        )

    async def _end(self, lease: Lease, own: int) -> int:
        """Number of tokens whose KV is present. After the return no push writes to the lease's
        blocks.
        """
        await self.inbound.receiver.end(lease.lease_id)
        self.inbound.leases.release()
        return self._arrived.pop(lease.lease_id, own)

    def _num_bytes(self, tokens: int) -> int:
        """Size of the KV of whole blocks of tokens."""
        context = self._context
        return tokens // context.cache.block_size * context.runner.layout.block_bytes

    def _timeout_s(self, tokens: int) -> float:
        """Timeout in seconds: the time to compute the tokens, within bounds."""
        rate = self.cost_model.tokens_per_second
        return min(max(_SHORTEST_S, tokens / rate), _LONGEST_S) if rate else _LONGEST_S

    def _commit(self, lease: Lease, first_token: int, num_tokens: int) -> None:
        self._arrived[lease.lease_id] = num_tokens
