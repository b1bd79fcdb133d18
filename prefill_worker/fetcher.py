"""Fetches the KV of a prompt's prefix from another worker's prefix cache into this worker's."""

from __future__ import annotations

import grpc

from kv_transfer.arena import device_of
from kv_transfer.copy_threads import to_its_end
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.messages import HandoffTarget, PrefixSource
from kvrelay.process.telemetry import get_logger
from kvrelay.protocol import VERSION
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import FetchRequest, kv_fetch
from kvrelay.worker.base import Identity
from kvrelay.worker.sequence import Sequence
from prefill_worker.fetch_cost_model import FetchCostModel

log = get_logger(__name__)

# Longest time, in seconds, that a prompt waits for another worker.
_LONGEST_S = 5.0
_SHORTEST_S = 0.25


class Fetcher:
    """Asks the worker that holds the prefix to push it into leased blocks of this worker. Lives on
    the worker's event loop.
    """

    def __init__(
        self,
        identity: Identity,
        runner: ModelRunner,
        cache: KvCache,
        sender: Sender,
        *,
        digests: bool,
        host: str,
    ) -> None:
        self._identity = identity
        self._runner = runner
        self._cache = cache
        self._clock = sender.clock
        self._channels = sender.channels
        self._leases = LeaseTable(identity.epoch)
        # Lease id -> tokens whose KV is now in the lease's blocks.
        self._arrived: dict[int, int] = {}
        self.cost_model = FetchCostModel()
        self.receiver = Receiver(
            runner.kv,
            self._leases,
            worker_id=identity.worker_id,
            model_id=runner.model_id,
            sampled_model_id=runner.sampled_model_id,
            layout_hash=runner.layout_hash,
            on_commit=self._commit,
            clock=sender.clock,
            digests=digests,
            host=host,
        )

    async def fetch(self, sequence: Sequence, source: PrefixSource, transport: str) -> None:
        """Fetches a prefix if the cost model predicts that this is faster than computing it.

        Afterwards the sequence holds all its blocks, with more KV than this worker's cache had, and
        may start. If the fetch failed or did not pay, or the call is cancelled, the sequence holds
        no blocks.
        """
        cache, began = self._cache, self._clock.now()
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
        now = self._clock.now()
        sequence.advance(self._cache, sequence.fetched_tokens)
        sequence.cached_tokens = sequence.num_computed
        sequence.started, sequence.fetch_seconds = now, now - began
        self.cost_model.add_fetch(self._num_bytes(sequence.fetched_tokens), now - began)

    async def _ask(self, sequence: Sequence, source: PrefixSource, transport: str, end: int) -> int:
        """Number of tokens that arrived."""
        own, size, spec = sequence.num_computed, self._cache.block_size, sequence.spec
        timeout_s = min(self._timeout_s(end - own), max(0.0, sequence.deadline - self._clock.now()))
        blocks = sequence.blocks[: end // size]
        lease = self._leases.grant(
            spec.key, blocks, own // size, 2 * timeout_s, self._clock.now(), partial=True
        )
        request = FetchRequest(
            *spec.key,
            tuple(sequence.tokens[:end]),
            self._target(lease, own, transport, source),
            source.cached_tokens,
            source.capability,
            spec.salt,
        )
        try:
            await kv_fetch(self._channels.get(source.address), request, timeout_s)
        except grpc.aio.AioRpcError as error:
            reason = error_from_rpc(error, source.address).message
            told = {"request": spec.request_id, "worker": source.worker_id, "reason": reason}
            log.info("prefix_fetch_failed", **told)
        finally:
            arrived = await to_its_end(self._end(lease, own))
        return max(0, arrived - own)

    async def _end(self, lease: Lease, own: int) -> int:
        """Number of tokens whose KV is present. After the return no push writes to the lease's
        blocks.
        """
        await self.receiver.end(lease.lease_id)
        self._leases.release()
        return self._arrived.pop(lease.lease_id, own)

    def _num_bytes(self, tokens: int) -> int:
        """Size of the KV of whole blocks of tokens."""
        return tokens // self._cache.block_size * self._runner.layout.block_bytes

    def _timeout_s(self, tokens: int) -> float:
        """Timeout in seconds: the time to compute the tokens, within bounds."""
        rate = self.cost_model.tokens_per_second
        return min(max(_SHORTEST_S, tokens / rate), _LONGEST_S) if rate else _LONGEST_S

    def _commit(self, lease: Lease, first_token: int, num_tokens: int) -> None:
        self._arrived[lease.lease_id] = num_tokens

    def _target(
        self, lease: Lease, cached_tokens: int, transport: str, source: PrefixSource
    ) -> HandoffTarget:
        return HandoffTarget(
            worker_id=self._identity.worker_id,
            address=self._identity.address,
            epoch=self._identity.epoch,
            lease_id=lease.lease_id,
            generation=lease.generation,
            num_blocks=len(lease.blocks),
            cached_tokens=cached_tokens,
            layout_hash=self._runner.layout_hash,
            host_id=self._identity.host_id,
            device=device_of(self._runner.kv),
            transport=transport,
            capability=self.receiver.capability(lease, source.worker_id),
            protocol=VERSION,
        )
