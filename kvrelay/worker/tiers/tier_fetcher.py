"""Brings the KV of a prompt's prefix back from this worker's tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf

from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.blocks.single_blocks import write_copies
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierKind
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.tiers.tier_cost import TierCost
from kvrelay.worker.tiers.tier_store import TierStore

# Bytes that are read before they are copied to the pool.
_CHUNK_BYTES = 8 * 2**20
# Bounds of the time, in seconds, that a prompt waits for a disk.
_SHORTEST_S, _LONGEST_S = 0.25, 5.0

log = get_logger("worker")


class TierFetcher:
    """Reads blocks into blocks that the sequence holds, while other sequences run. Lives on the
    worker's event loop.
    """

    def __init__(self, context: WorkerContext, store: TierStore) -> None:
        self._context = context
        self._store = store
        self.cost = TierCost()
        # Bytes of reads under way, which are ahead of a new one.
        self._reading = 0

    async def fetch(self, sequence: Sequence, *, spare_blocks: int = 0, beyond: int = 0) -> None:
        """Fetches a prefix if that is predicted to be sooner than computing it.

        Afterwards the sequence either holds all its blocks, with more KV than the pool had, and may
        start; or it holds none. It holds none if the prefix ends at `beyond` tokens or earlier, and
        if fewer than `spare_blocks` blocks would be left. A cancellation takes effect when nothing
        writes to the blocks.
        """
        if sequence.scores is not None:
            return
        cache, began = self._context.cache, self._context.clock.now()
        sequence.take_prefix(cache)
        own = sequence.num_computed
        kind: TierKind | None = None
        try:
            keys = await self._worthwhile(sequence, beyond)
            missing = sequence.units_missing(cache, len(sequence.tokens))
            if keys and missing + spare_blocks <= cache.pool.units_available:
                sequence.take_blocks(cache, len(sequence.tokens))
                kind = await self._read(sequence, keys)
        except OutOfBlocks:
            # The sequence waits for blocks like all others.
            pass
        # A fetch only saves time. After any failure this worker computes the prefix.
        except Exception:
            log.exception("kv_tier_fetch_failed", request=sequence.spec.request_id)
        finally:
            if kind is None or sequence.ended:
                sequence.drop_blocks(cache)
                sequence.fetched_tokens = 0
        if kind is None or sequence.ended:
            return
        now = self._context.clock.now()
        sequence.fetched_tokens, sequence.fetched_from = sequence.num_computed - own, kind
        sequence.cached_tokens = sequence.num_computed
        sequence.started, sequence.fetch_seconds = now, now - began

    async def _worthwhile(self, sequence: Sequence, beyond: int) -> list[BlockKey]:
        """The keys of the blocks to read; none if computing is predicted to be sooner."""
        size, now = self._context.cache.block_size, self._context.clock.now()
        first, end = len(sequence.blocks), (len(sequence.tokens) - 1) // size
        hashes, identities = sequence.hasher.hashes, sequence.hasher.identities()
        keys = [
            BlockKey(hashes[index], identities[index], sequence.spec.tenant)
            for index in range(first, end)
        ]
        if not keys:
            return []
        found = 0
        try:
            async with asyncio.timeout(_SHORTEST_S):
                found = await self._store.find(keys)
        except TimeoutError:
            log.warning("kv_tier_slow", operation="find", request=sequence.spec.request_id)
        self._missed(len(keys) - found)
        if (first + found) * size <= beyond:
            return []
        num_bytes = self._reading + found * self._block_bytes
        return keys[:found] if self.cost.is_read_faster(found * size, num_bytes, now) else []

    def _missed(self, blocks: int) -> None:
        for tier in self._store.tiers:
            tier.counts.misses += blocks

    async def _read(self, sequence: Sequence, keys: SequenceOf[BlockKey]) -> TierKind | None:
        """Reads blocks until one does not come. Returns the farthest tier that gave any."""
        began, chunk = self._context.clock.now(), max(1, _CHUNK_BYTES // self._block_bytes)
        done, kind = 0, None
        first = sequence.num_computed // self._context.cache.block_size
        num_bytes = len(keys) * self._block_bytes
        self._reading += num_bytes
        try:
            async with asyncio.timeout(self._timeout_s(sequence, len(keys))):
                while done < len(keys):
                    wanted = keys[done : done + chunk]
                    blocks, tier = await self._store.read(wanted)
                    if not blocks:
                        break
                    targets = sequence.blocks[first + done : first + done + len(blocks)]
                    copies = [block.copy for block in blocks]
                    good = await in_thread(write_copies, self._context.runner.kv, targets, copies)
                    if good:
                        kind = tier.kind if kind is None or tier is self._store.tiers[-1] else kind
                    tier.counts.hits += good
                    done += good
                    if good < len(blocks):
                        reason = "the bytes of a block do not have their digest"
                        tier.reject(wanted[good], reason)
                        break
        except TimeoutError:
            log.warning(
                "kv_tier_slow",
                operation="read",
                request=sequence.spec.request_id,
                blocks=len(keys),
                arrived=done,
            )
        finally:
            self._reading -= num_bytes
        now = self._context.clock.now()
        self.cost.add_read(done * self._block_bytes, now - began, now)
        self._missed(len(keys) - done)
        if not sequence.ended and done:
            sequence.advance(self._context.cache, done * self._context.cache.block_size)
        return kind

    def _timeout_s(self, sequence: Sequence, blocks: int) -> float:
        """Timeout in seconds: the time to compute the tokens, within bounds and the deadline."""
        rate = self.cost.tokens_per_second
        tokens = blocks * self._context.cache.block_size
        seconds = min(max(_SHORTEST_S, tokens / rate), _LONGEST_S) if rate else _LONGEST_S
        return min(seconds, max(0.0, sequence.deadline - self._context.clock.now()))

    @property
    def _block_bytes(self) -> int:
        return self._context.runner.layout.block_bytes
