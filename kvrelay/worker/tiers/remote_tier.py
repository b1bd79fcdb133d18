"""A tier of stores that several hosts share."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.channels import Channels
from kvrelay.clock import Clock
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierKind
from kvrelay.worker.tiers.doubts import Doubts
from kvrelay.worker.tiers.hash_ring import HashRing
from kvrelay.worker.tiers.slot_folder import stored_key
from kvrelay.worker.tiers.store_link import StoreLink
from kvrelay.worker.tiers.tier import StoredBlock, TierCounts
from kvrelay.worker.tiers.tier_errors import note_error

# Bytes of blocks that wait for all stores. What comes beyond is dropped.
STAGING_BYTES = 32 * 2**20
# Blocks of one prompt that are looked for.
_MAX_PROBED = 8192
# Reads that wait for stores. Prompts beyond are computed.
_MAX_READS = 64
# Blocks whose KV was in doubt. Of these, only the copies that were offered since are read, since
# another worker may store its own. A failure gives up all blocks of its sequences: this is enough
# for several contexts of a million tokens.
_REFUSED_KEPT = 2**18
# Seconds for which another worker's copy of such a block stays in the place of the own one, which
# is not stored meanwhile. Two workers that compute a block with different bits would otherwise
# replace each other's copies all the time.
_YIELDS_S = 60.0


@dataclass(slots=True)
class _Refused:
    """A block whose KV was in doubt."""

    # Digest of the copy that was offered since; None without one.
    own: int | None = None
    # Until then, another worker's copy stays in its place.
    yields_until: float = -math.inf


class RemoteTier:
    """Blocks in the memory of `kvrelay kv-store` processes. Consistent hashing over the addresses
    says which store keeps a block. While a store does not work, its blocks go to the next one, so
    the loss of a store loses its blocks only.

    No error of a store ends a request: the KV is computed.
    """

    kind: TierKind = "remote"

    def __init__(
        self,
        addresses: Sequence[str],
        layout: str,
        block_bytes: int,
        channels: Channels,
        clock: Clock,
    ) -> None:
        """addresses: HOST:PORT of the stores. layout: the hash that stands for model, layout and
        dtype of the weights.
        """
        self.counts = TierCounts()
        self._clock = clock
        self._drained = asyncio.Event()
        self._ring = HashRing(addresses)
        staging = STAGING_BYTES // len(addresses)
        self._links = {
            address: StoreLink(
                address, layout, block_bytes, staging, channels, clock, self.counts, self._drained
            )
            for address in addresses
        }
        # By identity.
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()
        self._doubts = Doubts()
        self._reading = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all stores that have answered."""
        return sum(link.status.size_bytes for link in self._links.values())

    @property
    def used_bytes(self) -> int:
        """Bytes that the blocks of all workers take in the stores."""
        return sum(link.status.used_bytes for link in self._links.values())

    @property
    def num_blocks(self) -> int:
        """Blocks of all workers in the stores."""
        return sum(link.status.blocks for link in self._links.values())

    @property
    def has_room(self) -> bool:
        """See `Tier.has_room`."""
        return any(link.has_room for link in self._links.values())

    @property
    def works(self) -> bool:
        """True if any store works."""
        return any(link.works for link in self._links.values())

    @property
    def is_drained(self) -> bool:
        """See `Tier.is_drained`."""
        return all(link.is_drained for link in self._links.values())

    async def wait_for_room(self) -> None:
        """See `Tier.wait_for_room`."""
        while not self.has_room:
            self._drained.clear()
            await self._drained.wait()

    def unsaved(self) -> tuple[StoredBlock, ...]:
        """See `Tier.unsaved`."""
        return ()

    def holds(self, key: BlockKey) -> bool:
        """True if the block waits here. What stores hold is asked for by `probe`."""
        return any(link.waits(key.identity) is not None for link in self._links.values())

    def touch(self, key: BlockKey) -> bool:
        """True if the block waits, or its store had it a short time ago, or another worker's copy
        stays in its place.
        """
        if self._yields(key.identity):
            return True
        link = self._link(key)
        return link is not None and link.knows(key.identity)

    def offer(self, block: StoredBlock) -> list[StoredBlock]:
        """See `Tier.offer`."""
        if not self.touch(block.key):
            link, identity = self._link(block.key), block.key.identity
            if link is None or not link.has_room:
                self.counts.dropped += 1
                return []
            refused, digest = self._refused.get(identity), block.copy.digest
            if refused and refused.own != digest:
                # Another worker may have stored its copy of the KV in doubt meanwhile. A link reads
                # and puts nothing that its store still has to forget.
                self._doom(identity)
                refused.own = digest
            link.offer(StoredBlock(stored_key(block.key), block.copy))
        return []

    async def probe(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.probe`. Asks all stores at the same time, for the blocks that are not known to
        be there: a wrong guess costs as much as a question.
        """
        keys = keys[:_MAX_PROBED]
        end = self._first_refused(keys)
        held = [self.touch(key) for key in keys[:end]]
        asked = self._by_link([n for n in range(end) if not held[n]], keys)
        answers = await asyncio.gather(
            *(link.find([keys[n].identity for n in numbers]) for link, numbers in asked)
        )
        for (_, numbers), found in zip(asked, answers, strict=True):
            for number, one in zip(numbers, found, strict=True):
                held[number] = one or self.touch(keys[number])
        return next((n for n, one in enumerate(held) if not one), end)

    async def read(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """See `Tier.read`. Asks all stores at the same time."""
        if self._reading >= _MAX_READS:
            return []
        keys = keys[: self._first_refused(keys)]
        blocks: dict[int, StoredBlock] = {}
        wanted = []
        for number, key in enumerate(keys):
            link = self._link(key)
            if link is not None and (waits := link.waits(key.identity)) is not None:
                blocks[number] = waits
            else:
                wanted.append(number)
        asked = self._by_link(wanted, keys)
        self._reading += 1
        began = asyncio.get_running_loop().time()
        try:
            with self._doubts.meanwhile() as doubted:
                answers = await asyncio.gather(
                    *(link.get([keys[n] for n in numbers]) for link, numbers in asked)
                )
        finally:
            self._reading -= 1
        num_bytes = 0
        for (_, numbers), found in zip(asked, answers, strict=True):
            blocks.update(zip(numbers, found, strict=False))
            num_bytes += sum(len(block.copy.data) for block in found)
        if num_bytes:
            self.counts.read(num_bytes, asyncio.get_running_loop().time() - began)
        missing = (n for n, key in enumerate(keys) if n not in blocks or key.identity in doubted)
        end = next(missing, len(keys))
        for number in range(end):
            if not self._may_use(blocks[number]):
                self._yield_to_another(keys[number].identity)
                end = number
                break
        return [blocks[n] for n in range(end)]

    def forget(self, key: BlockKey) -> None:
        """See `Tier.forget`."""
        self._refused[key.identity] = _Refused()
        self._refused.move_to_end(key.identity)
        if len(self._refused) > _REFUSED_KEPT:
            self._refused.popitem(last=False)
        self._doom(key.identity)

    def reject(self, key: BlockKey, reason: str) -> None:
        """See `Tier.reject`."""
        note_error(self.counts, self.kind, "read", reason)
        self.forget(key)

    async def run(self) -> None:
        """Keeps up with all stores, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._links.values():
                tasks.create_task(link.run())

    async def close(self) -> None:
        """See `Tier.close`. The connections are those of the worker."""

    def _yield_to_another(self, identity: bytes) -> None:
        """Notes that another worker's copy is in the place of the own one."""
        refused = self._refused[identity]
        refused.own, refused.yields_until = None, self._clock.now() + _YIELDS_S

    def _yields(self, identity: bytes) -> bool:
        refused = self._refused.get(identity)
        return refused is not None and self._clock.now() < refused.yields_until

    def _doom(self, identity: bytes) -> None:
        """Has the stores forget a block. It may be in any store that was its place for some time.
        Reads that are under way do not use it: they may compare another copy with the own one.
        """
        self._doubts.note(identity)
        for link in self._links.values():
            link.forget(identity)

    def _first_refused(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading keys whose blocks may be read."""
        refused = (self._refused.get(key.identity) for key in keys)
        return next((n for n, one in enumerate(refused) if one and one.own is None), len(keys))

    def _may_use(self, block: StoredBlock) -> bool:
        """False for a block that was in doubt, unless it is the copy that was offered since."""
        refused = self._refused.get(block.key.identity)
        return refused is None or refused.own == block.copy.digest

    def _link(self, key: BlockKey) -> StoreLink | None:
        """The store that keeps the block now; None if none works."""
        address = self._ring.place(key.identity, lambda one: self._links[one].works)
        return None if address is None else self._links[address]

    def _by_link(
        self, numbers: Sequence[int], keys: Sequence[BlockKey]
    ) -> list[tuple[StoreLink, list[int]]]:
        """The numbers of keys by the store that keeps them."""
        found: dict[str, list[int]] = {}
        for number in numbers:
            if (link := self._link(keys[number])) is not None:
                found.setdefault(link.address, []).append(number)
        return [(self._links[address], asked) for address, asked in found.items()]
