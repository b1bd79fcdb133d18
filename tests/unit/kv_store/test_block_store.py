"""The blocks of a store: bounded, fair between tenants, and never mixed up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.kv_store.block_store import ENTRY_BYTES, BlockStore

SIZE = 40 * (ENTRY_BYTES + 100)
OF_TENANT = 25 * (ENTRY_BYTES + 100)
keys = st.tuples(st.sampled_from(("l", "m")), st.integers(0, 60).map(lambda one: bytes([one])))
tenants = st.sampled_from("abc")


class StoreMachine(RuleBasedStateMachine):
    """Against a dictionary that never gives anything up."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(SIZE, OF_TENANT)
        self.put: dict[tuple[str, bytes], bytes] = {}

    @rule(key=keys, tenant=tenants, length=st.integers(1, 400))
    def puts(self, key: tuple[str, bytes], tenant: str, length: int) -> None:
        before = key in self.store
        frame = repr(key).encode().ljust(length, b".")
        self.store.put(key, tenant, frame)
        assert key in self.store
        if not before:
            self.put[key] = frame

    @rule(key=keys)
    def gets(self, key: tuple[str, bytes]) -> None:
        assert self.store.get(key) in (None, self.put.get(key))

    @rule(key=keys)
    def forgets(self, key: tuple[str, bytes]) -> None:
        assert self.store.forget(key) in (key in self.put, False)
        assert key not in self.store
        self.put.pop(key, None)

    @invariant()
    def is_within_its_bounds(self) -> None:
        assert not self.store.check_integrity()
        assert self.store.used_bytes <= SIZE
        assert all(self.store.bytes_of(tenant) <= OF_TENANT for tenant in "abc")


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=60)


@given(st.integers(1, 12), st.integers(50, 200))
def test_a_tenant_that_floods_the_store_pushes_out_its_own_blocks(own: int, flood: int) -> None:
    store = BlockStore(40 * (ENTRY_BYTES + 10))
    for number in range(own):
        store.put(("l", bytes([number])), "small", bytes(10))
    for number in range(flood):
        store.put(("l", b"f%d" % number), "large", bytes(10))
    assert all(("l", bytes([number])) in store for number in range(own))
    assert store.bytes_of("large") <= store.size_bytes - store.bytes_of("small")
    assert store.evicted == max(0, own + flood - 40)


def test_the_least_recently_used_block_goes_first() -> None:
    store = BlockStore(3 * (ENTRY_BYTES + 1))
    for name in (b"a", b"b", b"c"):
        store.put(("l", name), "t", b"x")
    assert store.get(("l", b"a"))
    store.put(("l", b"d"), "t", b"x")
    assert ("l", b"b") not in store
    assert ("l", b"a") in store


def test_layouts_are_apart() -> None:
    store = BlockStore(2**20)
    store.put(("l", b"a"), "t", b"x")
    assert store.get(("m", b"a")) is None


def test_what_cannot_fit_is_known_before() -> None:
    store = BlockStore(10_000, 5_000)
    assert store.fits(5_000 - ENTRY_BYTES)
    assert not store.fits(5_001 - ENTRY_BYTES)
