"""Brings the KV of a prompt's prefix back from this worker's tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.blocks.single_blocks import write_copies
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierKind
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.tiers.tier import Tier
from kvrelay.worker.tiers.tier_cost import REMOTE_GUESS, REMOTE_LATENCY_S, TierCost
from kvrelay.worker.tiers.tier_store import TierStore

# Bytes that are read before they are copied to the pool.
_CHUNK_BYTES = 8 * 2**20
# Bounds of the time, in seconds, that a prompt waits for a disk.
_SHORTEST_S, _LONGEST_S = 0.25, 5.0

log = get_logger("worker")


@dataclass(slots=True)
class _Measured:
    # Blocks that came and had their digests.
    blocks: int = 0
    # The tier, if reading from it is the copy to the pool and nothing else.
    host: Tier | None = None


class TierFetcher:
    """Reads blocks into blocks that the sequence holds, while other sequences run. Lives on the
    worker's event loop.
    """

    def __init__(self, context: WorkerContext, store: TierStore) -> None:
        self._context = context
        self._store = store
        # Of the tiers of this host.
        self.cost = TierCost()
        self._remote_cost = TierCost(first_guess=REMOTE_GUESS, latency_s=REMOTE_LATENCY_S)
        # Bytes of reads under way, which are ahead of a new one, by whether they are from stores.
        self._reading = {False: 0, True: 0}

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
            keys, found = await self._worthwhile(sequence, beyond)
            missing = sequence.units_missing(cache, len(sequence.tokens))
            if keys and missing + spare_blocks <= cache.pool.units_available:
                sequence.take_blocks(cache, len(sequence.tokens))
                kind = await self._read(sequence, keys, found)
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

    async def _worthwhile(
        self, sequence: Sequence, beyond: int
    ) -> tuple[list[BlockKey], list[Tier]]:
        """The keys of the blocks to read, and their tiers; none if computing is predicted to be
        sooner.
        """
        size, now = self._context.cache.block_size, self._context.clock.now()
        first, end = len(sequence.blocks), (len(sequence.tokens) - 1) // size
        hashes, identities = sequence.hasher.hashes, sequence.hasher.identities()
        keys = [
            BlockKey(hashes[index], identities[index], sequence.spec.tenant)
            for index in range(first, end)
        ]
        found: list[Tier] = []
        if not keys:
            return [], found
        try:
            async with asyncio.timeout(_SHORTEST_S):
                found = await self._store.find(keys)
        except TimeoutError:
            log.warning("kv_tier_slow", operation="find", request=sequence.spec.request_id)
        self._missed(len(keys) - len(found))
        # All of them, or else those before the first one that is in a store.
        near = next((n for n, tier in enumerate(found) if tier.kind == "remote"), len(found))
        for count in dict.fromkeys((len(found), near)):
            if (first + count) * size > beyond and self._is_faster(found[:count], now):
                return keys[:count], found[:count]
        return [], []

    def _is_faster(self, found: SequenceOf[Tier], now: float) -> bool:
        """Whether reading blocks from these tiers is predicted to be sooner than computing."""
        remote = sum(tier.kind == "remote" for tier in found)
        own_bytes = (len(found) - remote) * self._block_bytes
        remote_s = 0.0
        if remote:
            num_bytes = remote * self._block_bytes + self._reading[True]
            remote_s = self._remote_cost.read_s(num_bytes, now)
        if own_bytes:
            own_bytes += self._reading[False]
        tokens = len(found) * self._context.cache.block_size
        return self.cost.is_read_faster(tokens, own_bytes, now, remote_s)

    def _missed(self, blocks: int) -> None:
        for tier in self._store.tiers:
            tier.counts.misses += blocks

    async def _read(
        self, sequence: Sequence, keys: SequenceOf[BlockKey], found: SequenceOf[Tier]
    ) -> TierKind | None:
        """Reads blocks until one does not come. Returns the farthest tier that gave any; None if
        nothing was read that may be used.
        """
        chunk = max(1, _CHUNK_BYTES // self._block_bytes)
        done, farthest = 0, -1
        tiers, doubts = self._store.tiers, self._store.doubts
        first = sequence.num_computed // self._context.cache.block_size
        ahead = {False: 0, True: 0}
        for tier in found:
            ahead[tier.kind == "remote"] += self._block_bytes
        for remote, num_bytes in ahead.items():
            self._reading[remote] += num_bytes
        try:
            async with asyncio.timeout(self._timeout_s(sequence, len(keys))):
                while done < len(keys):
                    wanted, end = keys[done : done + chunk], done + chunk
                    with self._measured(
                        len(wanted), remote=found[done].kind == "remote"
                    ) as measured:
                        blocks, tier = await self._store.read(wanted, found[done:end])
                        if not blocks:
                            break
                        targets = sequence.blocks[first + done : first + done + len(blocks)]
                        copies = [block.copy for block in blocks]
                        kv = self._context.runner.kv
                        good = await in_thread(write_copies, kv, targets, copies)
                        measured.blocks, measured.host = good, tier if tier.kind == "host" else None
                    if good:
                        farthest = max(farthest, tiers.index(tier))
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
            for remote, num_bytes in ahead.items():
                self._reading[remote] -= num_bytes
        self._missed(len(keys) - done)
        if self._store.doubts != doubts:
            # One of the blocks may have come into doubt since it was read.
            return None
        if not sequence.ended and done:
            sequence.advance(self._context.cache, done * self._context.cache.block_size)
        return None if farthest < 0 else tiers[farthest].kind

    @contextmanager
    def _measured(self, wanted: int, *, remote: bool) -> Iterator[_Measured]:
        """Adds a measurement of reading `wanted` blocks, also if the read is given up."""
        began, measured = self._context.clock.now(), _Measured()
        try:
            yield measured
        finally:
            now, cost = self._context.clock.now(), self._remote_cost if remote else self.cost
            num_bytes = measured.blocks * self._block_bytes
            cost.add_read(num_bytes, now - began, now, wanted=wanted * self._block_bytes)
            if measured.host is not None and num_bytes:
                measured.host.counts.read(num_bytes, now - began)

    def _timeout_s(self, sequence: Sequence, blocks: int) -> float:
        """Timeout in seconds: the time to compute the tokens, within bounds and the deadline."""
        rate = self.cost.tokens_per_second
        tokens = blocks * self._context.cache.block_size
        seconds = min(max(_SHORTEST_S, tokens / rate), _LONGEST_S) if rate else _LONGEST_S
        return min(seconds, max(0.0, sequence.deadline - self._context.clock.now()))

    @property
    def _block_bytes(self) -> int:
        return self._context.runner.layout.block_bytes
