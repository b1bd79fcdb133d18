"""Which blocks a tier keeps: checked against a plain list."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.kv_block import BlockKey
from kvrelay.worker.tiers.tier_index import TierIndex


def key(number: int, tenant: str = "a") -> BlockKey:
    return BlockKey(b"%d" % number, hashlib.sha256(b"%d" % number).digest(), tenant)


class Plain:
    """A list of (number, tenant), least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[tuple[int, str]] = []

    def touch(self, number: int) -> bool:
        for one in self.blocks:
            if one[0] == number:
                self.blocks.remove(one)
                self.blocks.append(one)
                return True
        return False

    def evict(self) -> tuple[int, str]:
        tenants = [tenant for _, tenant in self.blocks]
        most = max(tenants.count(tenant) for tenant in tenants)
        largest = {tenant for tenant in tenants if tenants.count(tenant) == most}
        # The index may take any of the largest tenants.
        return next(one for one in self.blocks if one[1] in largest)


actions = st.tuples(
    st.sampled_from(("add", "touch", "remove")), st.integers(0, 11), st.sampled_from("abc")
)


@given(st.integers(1, 6), st.lists(actions, max_size=60))
def test_it_keeps_what_a_plain_list_keeps(capacity: int, work: list[tuple[str, int, str]]) -> None:
    index, plain = TierIndex(capacity), Plain(capacity)
    for action, number, tenant in work:
        if action == "touch":
            assert index.touch(key(number)) == plain.touch(number)
        elif action == "remove":
            gone = index.remove(key(number))
            assert (gone is not None) == any(one[0] == number for one in plain.blocks)
            plain.blocks = [one for one in plain.blocks if one[0] != number]
        elif not plain.touch(number):
            for evicted in index.make_room():
                first = (int(evicted.hash), evicted.tenant)
                tenants = [name for _, name in plain.blocks]
                assert tenants.count(first[1]) == max(map(tenants.count, tenants))
                assert first == next(one for one in plain.blocks if one[1] == first[1])
                plain.blocks.remove(first)
            index.add(key(number, tenant))
            plain.blocks.append((number, tenant))
        else:
            index.add(key(number, tenant))
        assert {int(one.hash) for one in index} == {one[0] for one in plain.blocks}
        assert len(index) <= capacity
        assert not index.check_integrity()


@given(st.integers(2, 20), st.integers(0, 200))
def test_a_tenant_cannot_flush_anothers_share(capacity: int, flood: int) -> None:
    index = TierIndex(capacity)
    own = capacity // 2
    for number in range(own):
        index.make_room()
        index.add(key(number, "small"))
    for number in range(flood):
        index.make_room()
        index.add(key(1000 + number, "flood"))
    assert index.blocks_of("small") == own


def test_a_tier_for_no_block_keeps_none() -> None:
    index = TierIndex(0)
    assert index.make_room() == []
    assert len(index) == 0
