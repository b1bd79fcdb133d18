from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kv_transfer.lease import Lease, LeaseTable
from kvrelay.errors import FailedPrecondition, NotFound

KEY = ("request", 0)


def granted(now: float = 0.0) -> tuple[LeaseTable, Lease]:
    table = LeaseTable(epoch=3)
    return table, table.grant(KEY, [4, 5, 6], 1, seconds=10.0, now=now)


def test_a_live_lease_is_found_by_its_numbers() -> None:
    table, lease = granted()
    assert table.find(lease.lease_id, 3, lease.generation, now=9.9) == lease
    assert (lease.blocks, lease.writable) == ((4, 5, 6), (5, 6))


@pytest.mark.parametrize(
    ("lease_id", "epoch", "generation", "error", "says"),
    [
        (0, -1, 0, FailedPrecondition, "epoch 2 is not the current epoch 3"),
        (0, 1, 0, FailedPrecondition, "epoch 4 is not"),
        (0, 0, 1, FailedPrecondition, "generation 2 of lease 1 is not the current generation 1"),
        (99, 0, 0, NotFound, "lease 100 does not exist in epoch 3"),
    ],
)
def test_a_wrong_number_is_named(
    lease_id: int, epoch: int, generation: int, error: type, says: str
) -> None:
    table, lease = granted()
    with pytest.raises(error, match=says):
        table.find(lease.lease_id + lease_id, 3 + epoch, lease.generation + generation, now=0.0)


def test_a_lease_ends_with_its_time_even_before_anyone_collects_it() -> None:
    table, lease = granted()
    with pytest.raises(FailedPrecondition, match="lease 1 has ended"):
        table.find(lease.lease_id, 3, lease.generation, now=10.0)
    assert table.renew([lease.lease_id], 10.0, now=10.0) == [lease.lease_id]
    assert table.expire(now=10.0) == [lease]
    assert table.expire(now=11.0) == []
    assert table.release() == [lease]


def test_a_renewed_lease_lasts_from_then() -> None:
    table, lease = granted()
    assert table.renew([lease.lease_id, 77], 10.0, now=6.0) == [77]
    assert table.expire(now=15.9) == []
    assert table.expire(now=16.0) == [lease]


def test_a_closed_lease_is_released_once_nothing_is_copied_into_it() -> None:
    table, lease = granted()
    table.pin(lease.lease_id)
    table.pin(lease.lease_id)
    table.close(lease.lease_id)
    table.close(lease.lease_id)
    with pytest.raises(FailedPrecondition):
        table.find(lease.lease_id, 3, lease.generation, now=0.0)
    table.unpin(lease.lease_id)
    assert table.release() == []
    assert len(table) == 1
    table.unpin(lease.lease_id)
    assert table.release() == [lease]
    assert table.release() == []
    with pytest.raises(NotFound):
        table.find(lease.lease_id, 3, lease.generation, now=0.0)


def test_a_commit_is_done_once_and_repeated_with_equal_content_only() -> None:
    table, lease = granted()
    assert table.commit(lease.lease_id, "content")
    assert not table.commit(lease.lease_id, "content")
    with pytest.raises(FailedPrecondition, match="committed with other content"):
        table.commit(lease.lease_id, "other")
    assert table.find(lease.lease_id, 3, lease.generation, now=1e9) == lease
    assert table.is_committed(lease.lease_id)


def test_a_committed_lease_holds_nothing_any_more() -> None:
    table, lease = granted()
    table.commit(lease.lease_id, "content")
    table.close(lease.lease_id)
    assert (len(table), table.expire(now=1e9), table.release()) == (0, [], [])
    assert table.renew([lease.lease_id], 1.0, now=0.0) == [lease.lease_id]


def test_old_commits_are_forgotten() -> None:
    table, lease = granted()
    table.commit(lease.lease_id, "content")
    for n in range(1024):
        table.commit(table.grant(KEY, [n], 0, 1.0, 0.0).lease_id, "content")
    with pytest.raises(NotFound):
        table.find(lease.lease_id, 3, lease.generation, now=0.0)


def test_integrity_finds_a_block_that_is_promised_twice() -> None:
    table, _ = granted()
    table.grant(KEY, [4, 7], 1, 10.0, 0.0)
    table.check_integrity()  # 4 is cached in both
    table.grant(KEY, [6], 0, 10.0, 0.0)
    with pytest.raises(AssertionError, match="block 6 is in leases 1 and 3"):
        table.check_integrity()


def test_integrity_finds_a_cached_block_that_another_lease_writes() -> None:
    table, _ = granted()
    table.grant(KEY, [4], 0, 10.0, 0.0)
    with pytest.raises(AssertionError, match="cached block 4 of lease 1"):
        table.check_integrity()


class Books(RuleBasedStateMachine):
    """A pool of blocks and its leases: nobody ever holds a block twice, and all come back."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(epoch=1)
        self.free = set(range(12))
        self.committed: set[int] = set()
        self.copying: list[Lease] = []
        self.seen: set[int] = set()
        self.now = 0.0

    @rule(target=leases, count=st.integers(1, 5), seconds=st.sampled_from([1.0, 5.0]))
    def grant(self, count: int, seconds: float) -> object:
        if len(self.free) < count:
            return multiple()
        blocks = [self.free.pop() for _ in range(count)]
        lease = self.table.grant(KEY, blocks, 0, seconds, self.now)
        assert lease.lease_id not in self.seen
        self.seen.add(lease.lease_id)
        return lease

    @rule(lease=leases)
    def begin_copy(self, lease: Lease) -> None:
        try:
            self.table.find(lease.lease_id, 1, lease.generation, self.now)
        except (FailedPrecondition, NotFound):
            return
        if not self.table.is_committed(lease.lease_id):
            self.table.pin(lease.lease_id)
            self.copying.append(lease)

    @rule()
    def end_copy(self) -> None:
        if self.copying:
            self.table.unpin(self.copying.pop().lease_id)

    @rule(lease=leases)
    def commit(self, lease: Lease) -> None:
        if lease in self.copying:
            return
        try:
            self.table.find(lease.lease_id, 1, lease.generation, self.now)
        except (FailedPrecondition, NotFound):
            return
        if self.table.commit(lease.lease_id, lease):
            self.committed.update(lease.blocks)

    @rule(lease=consumes(leases))
    def close(self, lease: Lease) -> None:
        self.table.close(lease.lease_id)

    @rule(lease=leases)
    def renew(self, lease: Lease) -> None:
        self.table.renew([lease.lease_id], 3.0, self.now)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)

    @rule()
    def release(self) -> None:
        for lease in self.table.release():
            assert lease not in self.copying, "released under a copy"
            self.free.update(lease.blocks)

    @rule()
    def finish_sequences(self) -> None:
        self.free |= self.committed
        self.committed.clear()

    @invariant()
    def every_block_has_one_holder(self) -> None:
        self.table.check_integrity()
        leased = [block for lease in self.table for block in lease.blocks]
        assert sorted([*self.free, *self.committed, *leased]) == list(range(12))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
