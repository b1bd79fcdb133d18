"""Block pool, prefix cache and leases together, as a decode worker uses them, against a model that
cannot be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.few_hashes import CUTS, CollidingCache, Cut

from kv_transfer.lease import Lease, LeaseTable
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.errors import FailedPrecondition, NotFound

SIZE = 2
EPOCH = 3
# Few token ids, so that prefixes are shared
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
Prompt = tuple[int, ...]


@dataclass(eq=False)
class Reserved:
    """A sequence whose KV is on its way, and what of it has come."""

    prompt: Prompt
    lease: Lease
    until: float
    closed: bool = False
    copying: list[int] = field(default_factory=list)  # blocks that a copy under way writes

    def content(self, index: int) -> Prompt:
        return self.prompt[: (index + 1) * SIZE]


class LeasedCache(RuleBasedStateMachine):
    """The model knows for each block the tokens whose KV was written there last, and who may write.

    It holds: who reads a block finds the KV of its own tokens, whatever was cached, evicted, leased
    and given back between, and whichever blocks have one hash; a block is written by one owner
    only; all blocks are held or available.
    """

    @initialize(
        num_blocks=st.integers(3, 12),
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
        cut=st.sampled_from([None, *CUTS]),
    )
    def start(self, num_blocks: int, prompts: list[Prompt], cut: Cut | None) -> None:
        self.cache = (
            KvCache(num_blocks, SIZE) if cut is None else CollidingCache(num_blocks, SIZE, cut)
        )
        self.leases = LeaseTable(EPOCH)
        self.prompts = prompts
        self.kv: dict[int, Prompt] = {}  # block -> tokens up to its end, as written
        self.waiting: list[Reserved] = []
        self.running: list[tuple[Prompt, list[int]]] = []
        self.now = 0.0

    @rule(data=st.data(), seconds=st.sampled_from([1.0, 4.0]))
    def reserve_for(self, data: st.DataObject, seconds: float) -> None:
        self.reserve(data, seconds)

    def hashed(self, prompt: Prompt) -> BlockHasher:
        hasher = self.cache.hasher("")
        hasher.extend(prompt)
        return hasher

    def reserve(self, data: st.DataObject, seconds: float) -> None:
        prompt = data.draw(st.sampled_from(self.prompts), label="prompt")
        blocks = self.cache.match(self.hashed(prompt), len(prompt) - 1)
        for index, block in enumerate(blocks):
            assert self.kv[block] == prompt[: (index + 1) * SIZE], (
                "the prefix cache has KV of other tokens"
            )
        cached = len(blocks)
        try:
            blocks += self.cache.allocate(-(-len(prompt) // SIZE) - cached)
        except OutOfBlocks:
            self.cache.release(blocks)
            return
        lease = self.leases.grant((str(self.now), 0), blocks, cached, seconds, self.now)
        self.waiting.append(Reserved(prompt, lease, self.now + seconds))

    def _live(self, one: Reserved) -> bool:
        """As a receiver asks before it writes or commits."""
        try:
            found = self.leases.find(one.lease.lease_id, EPOCH, one.lease.generation, self.now)
        except (FailedPrecondition, NotFound):
            assert one.closed or self.now >= one.until, "a live lease was refused"
            return False
        assert found == one.lease
        assert not one.closed, "a closed lease was found"
        assert self.now < one.until, "an expired lease was found"
        return True

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def begin_copy(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting), label="lease")
        if self._live(one) and not one.copying and one.lease.writable:
            self.leases.pin(one.lease.lease_id)
            one.copying = list(one.lease.writable)

    @rule(data=st.data())
    def reserve_and_begin(self, data: st.DataObject) -> None:
        before = len(self.waiting)
        self.reserve(data, 1.0)
        for one in self.waiting[before:]:
            if one.lease.writable:
                self.leases.pin(one.lease.lease_id)
                one.copying = list(one.lease.writable)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        """The thread writes at some moment before this one, whatever has become of the lease."""
        one = data.draw(st.sampled_from(self.waiting), label="lease")
        if one.copying:
            for index, block in enumerate(one.lease.blocks):
                if block in one.copying:
                    self.kv[block] = one.content(index)
            one.copying = []
            self.leases.unpin(one.lease.lease_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(self.waiting), label="lease"))

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """All of it without a stop, as most go."""
        before = len(self.waiting)
        self.reserve(data, 4.0)
        for one in self.waiting[before:]:
            for index, block in enumerate(one.lease.blocks):
                if block in one.lease.writable:
                    self.kv[block] = one.content(index)
            self._commit(one)

    def _commit(self, one: Reserved) -> None:
        complete = all(
            self.kv.get(block) == one.content(i) for i, block in enumerate(one.lease.blocks)
        )
        if one.copying or not complete or not self._live(one):
            return
        assert self.leases.commit(one.lease.lease_id, one.prompt)
        assert not self.leases.commit(one.lease.lease_id, one.prompt), (
            "what is committed once is not committed again"
        )
        self.waiting.remove(one)
        self.cache.publish(
            self.hashed(one.prompt),
            one.lease.blocks,
            one.lease.cached_blocks,
            len(one.prompt) // SIZE,
        )
        self.running.append((one.prompt, list(one.lease.blocks)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting), label="lease")
        self.leases.close(one.lease.lease_id)
        one.closed = True
        self._release()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting), label="lease")
        live = not one.closed and self.now < one.until
        assert self.leases.renew([one.lease.lease_id], 3.0, self.now) == (
            [] if live else [one.lease.lease_id]
        )
        if live:
            one.until = self.now + 3.0

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        """A worker looks now and then; until then an expired lease is refused all the same."""
        for lease in self.leases.expire(self.now):
            next(one for one in self.waiting if one.lease == lease).closed = True
        self._release()

    def _release(self) -> None:
        for lease in self.leases.release():
            one = next(one for one in self.waiting if one.lease == lease)
            assert one.closed, "a live lease was released"
            assert not one.copying, "blocks were given back under a copy"
            self.waiting.remove(one)
            self.cache.release(lease.blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, blocks = self.running.pop(
            data.draw(st.integers(0, len(self.running) - 1), label="sequence")
        )
        self.cache.release(blocks)

    @invariant()
    def who_runs_reads_its_own(self) -> None:
        for prompt, blocks in getattr(self, "running", ()):
            assert [self.kv[block] for block in blocks] == [
                prompt[: (i + 1) * SIZE] for i in range(len(blocks))
            ]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        self.leases.check_integrity()
        held = {block for _, blocks in self.running for block in blocks}
        held |= {block for one in self.waiting for block in one.lease.blocks}
        assert self.cache.pool.num_held == len(held)
        assert self.cache.pool.units_available == self.cache.pool.num_blocks - len(held)
        writers = [block for one in self.waiting for block in one.lease.writable]
        assert len(writers) == len(set(writers)), "two may write to one block"


TestLeasedCache = LeasedCache.TestCase
TestLeasedCache.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
