"""The blocks of a store, and which of them it gives up first. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

# Bytes of this process for a block beside its record: keys, entries and objects.
ENTRY_BYTES = 768

# Layout hash, identity.
StoreKey = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class _Entry:
    tenant: str
    record: bytes

    @property
    def cost(self) -> int:
        return len(self.record) + ENTRY_BYTES


class BlockStore:
    """Records of blocks by layout and identity, within a number of bytes.

    The next block to go is the least recently used one of the tenant with the most bytes. So no
    tenant loses blocks while another tenant has more, and a tenant may use all that others leave,
    up to `tenant_bytes`. A tenant above `tenant_bytes` gives up its own blocks.
    """

    def __init__(self, size_bytes: int, tenant_bytes: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.tenant_bytes = size_bytes if tenant_bytes is None else min(tenant_bytes, size_bytes)
        self.used_bytes = 0
        # Blocks since the start.
        self.stored = 0
        self.evicted = 0
        self._entries: dict[StoreKey, _Entry] = {}
        # Tenant -> keys, least recently used first.
        self._order: dict[str, OrderedDict[StoreKey, None]] = {}
        self._bytes: dict[str, int] = {}
        # A heap of (-bytes, tenant). Some entries are out of date.
        self._by_bytes: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._entries

    @property
    def num_tenants(self) -> int:
        """Tenants with blocks."""
        return len(self._order)

    def bytes_of(self, tenant: str) -> int:
        """Bytes that the tenant's blocks take."""
        return self._bytes.get(tenant, 0)

    def fits(self, record_bytes: int) -> bool:
        """True if a record of this size can be stored at all."""
        return record_bytes + ENTRY_BYTES <= self.tenant_bytes

    def get(self, key: StoreKey) -> bytes | None:
        """The block's record. The block becomes its tenant's most recently used."""
        return self._entries[key].record if self.touch(key) else None

    def touch(self, key: StoreKey) -> bool:
        """Makes the block its tenant's most recently used. Returns False if it is not here."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._order[entry.tenant].move_to_end(key)
        return True

    def put(self, key: StoreKey, tenant: str, record: bytes) -> None:
        """Stores a block, for which others may have to go. The record must fit. A block that is
        here stays as it is, and charged to its tenant.
        """
        if self.touch(key):
            return
        assert self.fits(len(record)), "the caller checks the size of the record"
        entry = _Entry(tenant, record)
        while self.bytes_of(tenant) + entry.cost > self.tenant_bytes:
            self._evict(tenant)
        while self.used_bytes + entry.cost > self.size_bytes:
            self._evict(self._largest())
        self._entries[key] = entry
        self._order.setdefault(tenant, OrderedDict())[key] = None
        self._charge(tenant, entry.cost)
        self.stored += 1

    def forget(self, key: StoreKey) -> bool:
        """Removes a block. Returns False if it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        order = self._order[entry.tenant]
        del order[key]
        if not order:
            del self._order[entry.tenant]
        self._charge(entry.tenant, -entry.cost)
        return True

    def _evict(self, tenant: str) -> None:
        self.forget(next(iter(self._order[tenant])))
        self.evicted += 1

    def _largest(self) -> str:
        """The tenant with the most bytes."""
        while -self._by_bytes[0][0] != self.bytes_of(self._by_bytes[0][1]):
            # This entry is out of date.
            heapq.heappop(self._by_bytes)
        return self._by_bytes[0][1]

    def _charge(self, tenant: str, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        left = self.bytes_of(tenant) + num_bytes
        if left:
            self._bytes[tenant] = left
            heapq.heappush(self._by_bytes, (-left, tenant))
        else:
            del self._bytes[tenant]
        if len(self._by_bytes) > 2 * len(self._bytes) + 1024:
            self._by_bytes = [(-held, name) for name, held in self._bytes.items()]
            heapq.heapify(self._by_bytes)

    def check_integrity(self) -> str:
        """Describes the inconsistency, or returns an empty string."""
        costs: dict[str, int] = {}
        for entry in self._entries.values():
            costs[entry.tenant] = costs.get(entry.tenant, 0) + entry.cost
        if costs != self._bytes or sum(costs.values()) != self.used_bytes:
            return "the bytes of the tenants are counted wrong"
        if {key for order in self._order.values() for key in order} != self._entries.keys():
            return "the blocks and the order of eviction differ"
        if self.used_bytes > self.size_bytes:
            return f"{self.used_bytes} bytes are in a store of {self.size_bytes}"
        noted = {name for held, name in self._by_bytes if -held == self.bytes_of(name)}
        missing = self._bytes.keys() - noted
        return f"blocks of {sorted(missing)} would never be given up" if missing else ""
