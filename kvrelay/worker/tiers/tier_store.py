"""Keeps what the block pool evicts: the tiers of one worker, nearest first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kv_transfer.blocks.arena import Arena
from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.blocks.single_blocks import copies_of
from kv_transfer.channels import Channels
from kvrelay.clock import Clock
from kvrelay.config.tiers import TierConfig
from kvrelay.engine.kvcache.cache_listener import CacheListener
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierLoad
from kvrelay.worker.tiers.disk_tier import DiskTier
from kvrelay.worker.tiers.host_tier import HostTier
from kvrelay.worker.tiers.remote_tier import RemoteTier
from kvrelay.worker.tiers.slot_folder import SlotFolder
from kvrelay.worker.tiers.tier import StoredBlock, Tier

# Bytes that are copied out of the pool at a time.
_BATCH_BYTES = 4 * 2**20
# Blocks that are looked at before other tasks have their turn.
_LOOKED_AT = 256
# Seconds in which a worker that ends in order stores what it has cached.
FLUSH_S = 5.0

log = get_logger("worker")


class TierStore(CacheListener):
    """Copies cached blocks to the nearest tier before the pool evicts them, while fewer than half
    of the pool's blocks are free. With a remote tier, copies them at once, to both.

    An eviction itself then costs nothing, and no allocation waits for a copy. The pool's books do
    not change: a copy takes no hold on its block. A block whose number of allocations is the same
    before and after a copy has not been written to meanwhile. Otherwise the copy is discarded.

    What a tier gives up goes to the next tier. Other hosts can use what a remote tier has, while
    this one has it too. Lives on the event loop that owns the cache.
    """

    def __init__(self, cache: KvCache, arena: Arena, tiers: Sequence[Tier]) -> None:
        """tiers: nearest first; one at least."""
        self.tiers = tuple(tiers)
        # How often a block came into doubt.
        self.doubts = 0
        self._own = tuple(tier for tier in tiers if tier.kind != "remote")
        self._shared = next((tier for tier in tiers if tier.kind == "remote"), None)
        self._cache = cache
        self._arena = arena
        # Cached blocks that may have no copy, next to be evicted first, with the number of their
        # allocation.
        self._queue: OrderedDict[int, int] = OrderedDict()
        self._reserve = cache.pool.num_blocks // 2
        self._wake = asyncio.Event()
        self._flushing = False
        cache.listen(self)

    @classmethod
    def build(
        cls,
        configs: Sequence[TierConfig],
        cache: KvCache,
        arena: Arena,
        layout: str,
        clock: Clock,
        channels: Channels,
    ) -> TierStore:
        """Builds the tiers of a worker. `run` opens them. Workers with the same `layout` read each
        other's blocks. channels: connections to stores.
        """
        block_bytes = arena.layout.block_bytes
        tiers: list[Tier] = []
        for config in configs:
            match config.kind:
                case "host":
                    tiers.append(HostTier(config.size_bytes, block_bytes))
                case "disk":
                    folder = SlotFolder(Path(config.path), layout, block_bytes)
                    tiers.append(DiskTier(folder, config.size_bytes, block_bytes, clock))
                case "remote":
                    tiers.append(RemoteTier(config.addresses, layout, block_bytes, channels, clock))
        return cls(cache, arena, tiers)

    # What the cache reports

    def cached(self, block: int) -> None:
        """See `CacheListener.cached`."""
        self._queue.pop(block, None)
        self._queue[block] = self._cache.pool.generation(block)
        self._wake.set()

    def withdrawn(self, block: int) -> None:
        """See `CacheListener.withdrawn`."""
        if (key := self._cache.key_of(block)) is not None:
            self.doubts += 1
            for tier in self.tiers:
                tier.forget(key)

    # Storing

    def keep_house(self) -> None:
        """Looks whether there is something to store. Called often."""
        if self._queue and self._is_due:
            self._wake.set()

    @property
    def _is_due(self) -> bool:
        shared = self._shared is not None and self._shared.has_room
        return self._flushing or shared or self._cache.pool.num_free < self._reserve

    async def run(self) -> None:
        """Opens the tiers and stores blocks, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for tier in self.tiers:
                tasks.create_task(tier.run())
            tasks.create_task(self._store())

    async def _store(self) -> None:
        while True:
            self._wake.clear()
            if not any(tier.has_room for tier in self._fed):
                await self._until_room()
            elif self._queue and self._is_due:
                await self._copy_some()
            else:
                await self._wake.wait()

    async def _copy_some(self) -> None:
        batch = self._next_batch()
        try:
            if batch:
                await self._copy(batch)
            else:
                # All were stored already. Others have their turn.
                await asyncio.sleep(0)
        # A tier only saves time. Without the copies the worker serves on.
        except Exception:
            log.exception("kv_tier_failed", tier=self.tiers[0].kind)
            self.tiers[0].counts.errors += 1
            self.tiers[0].counts.dropped += len(batch)
            await asyncio.sleep(1.0)

    async def _until_room(self) -> None:
        """Returns when a tier that gets blocks from the pool may have room."""
        waits = [asyncio.create_task(tier.wait_for_room()) for tier in self._fed]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    @property
    def _fed(self) -> tuple[Tier, ...]:
        """The tiers that get blocks from the pool."""
        return self._own[:1] if self._shared is None else (*self._own[:1], self._shared)

    def _next_batch(self) -> list[tuple[int, int, BlockKey]]:
        """Blocks to copy, with the numbers of their allocations, and their keys."""
        pool = self._cache.pool
        batch: list[tuple[int, int, BlockKey]] = []
        most = max(1, _BATCH_BYTES // self._arena.layout.block_bytes)
        for _ in range(min(len(self._queue), _LOOKED_AT)):
            if len(batch) == most:
                break
            block, generation = self._queue.popitem(last=False)
            key = self._cache.key_of(block)
            if pool.generation(block) != generation:
                # Evicted in the meantime.
                self.tiers[0].counts.dropped += 1
            # A block that is held again comes again when it is released.
            elif key is not None and pool.is_cached(block):
                touched = [tier.touch(key) for tier in self._own]
                stored = not touched or any(touched)
                # Stores that are down or behind are no reason to copy a block.
                shared = self._shared
                if shared is not None and shared.has_room:
                    stored = shared.touch(key) and stored
                if not stored:
                    batch.append((block, generation, key))
        return batch

    async def _copy(self, batch: Sequence[tuple[int, int, BlockKey]]) -> None:
        began = asyncio.get_running_loop().time()
        copies = await in_thread(copies_of, self._arena, [block for block, _, _ in batch])
        if self.tiers[0].kind == "host":
            # The copy is all that there is to do.
            num_bytes = len(copies) * self._arena.layout.block_bytes
            seconds = asyncio.get_running_loop().time() - began
            self.tiers[0].counts.written(num_bytes, seconds)
        for (block, generation, key), copy in zip(batch, copies, strict=True):
            same = self._cache.pool.generation(block) == generation
            if same and self._cache.key_of(block) == key:
                stored = StoredBlock(key, copy)
                if self._own and not any(tier.holds(key) for tier in self._own):
                    self._offer(0, stored)
                if self._shared is not None:
                    self._shared.offer(stored)
            else:
                self.tiers[0].counts.dropped += 1

    def _offer(self, level: int, block: StoredBlock) -> None:
        given_up = self._own[level].offer(block)
        if level + 1 < len(self._own):
            for one in given_up:
                self._offer(level + 1, one)

    async def flush(self, seconds: float = FLUSH_S) -> None:
        """Stores what is cached, so that it survives the worker. Gives up after some seconds. The
        tiers must be running.
        """
        self._flushing = True
        self._wake.set()
        try:
            async with asyncio.timeout(seconds):
                # No event tells of all of it.
                while self._queue and self._works:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await self._settle()
                await self._demote()
        except TimeoutError:
            return
        finally:
            self._flushing = False

    @property
    def _works(self) -> bool:
        return any(tier.works for tier in self._fed)

    async def _demote(self) -> None:
        """Offers everything in memory to the tiers behind it."""
        for tier, behind in pairwise(self.tiers):
            for block in tier.unsaved():
                if not behind.has_room:
                    await self._settle()
                # It may have come into doubt meanwhile.
                if tier.holds(block.key):
                    behind.offer(block)
        await self._settle()

    async def _settle(self) -> None:
        """Returns when no tier has anything left to store."""
        for tier in self.tiers:
            while not tier.is_drained:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    # Reading

    async def find(self, keys: Sequence[BlockKey]) -> list[Tier]:
        """The leading blocks that the tiers probably return: for each the tier that has it. May
        wait for a disk and for other processes.
        """
        found: list[Tier] = []
        while len(found) < len(keys):
            key = keys[len(found)]
            if near := next((tier for tier in self.tiers if tier.holds(key)), None):
                found.append(near)
                continue
            # Only up to the next block that is nearer.
            left = keys[len(found) :]
            left = left[: self._next_held(left)]
            for tier in self.tiers:
                if more := await tier.probe(left):
                    found += [tier] * more
                    break
            else:
                break
        return found

    def _next_held(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading blocks that no tier certainly has."""
        held = (n for n, key in enumerate(keys) if any(tier.holds(key) for tier in self.tiers))
        return next(held, len(keys))

    async def read(
        self, keys: Sequence[BlockKey], found: Sequence[Tier]
    ) -> tuple[list[StoredBlock], Tier]:
        """The leading blocks that one tier returns, and that tier. found: what `find` said of
        them. May wait for a disk and for other processes.
        """
        tier = found[0]
        end = next((n for n, one in enumerate(found) if one is not tier), len(found))
        blocks = await tier.read(keys[:end])
        if not blocks:
            # It may have moved on since.
            for tier in self.tiers[self.tiers.index(found[0]) + 1 :]:
                if blocks := await tier.read(keys[:end]):
                    break
        return blocks, tier

    def load(self) -> tuple[TierLoad, ...]:
        """The state and the counts of each tier."""
        return tuple(
            TierLoad(
                kind=tier.kind,
                size_bytes=tier.size_bytes,
                used_bytes=tier.used_bytes,
                blocks=tier.num_blocks,
                hits=tier.counts.hits,
                misses=tier.counts.misses,
                stored=tier.counts.stored,
                evicted=tier.counts.evicted,
                dropped=tier.counts.dropped,
                errors=tier.counts.errors,
                error=tier.counts.error,
                read_rate=tier.counts.read_rate,
                write_rate=tier.counts.write_rate,
                skipped=tier.counts.skipped,
            )
            for tier in self.tiers
        )

    async def close(self) -> None:
        """Ends the tiers. Call it when `run` has ended."""
        for tier in self.tiers:
            await tier.close()
